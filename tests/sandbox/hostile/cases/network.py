"""Programs that want to talk to somebody: the service, its neighbours, the machine's own networks or the world."""

from __future__ import annotations

from ..case import Case, either, error, program, stdout
from .preludes import LIBC, SYSCALLS

_KNOCK = program("""
    import socket
    def knock(family, kind, address, protocol=0):
        try:
            with socket.socket(family, kind, protocol) as s:
                s.settimeout(1)
                s.connect(address)
                s.send(b'hello')
        except OSError: print('refused')
        else: print('REACHED')
""")

CASES = [
    Case(
        "loopback-tcp",
        "a service that listens on the host's own loopback",
        _KNOCK + "knock(socket.AF_INET, socket.SOCK_STREAM, ('127.0.0.1', HOST_TCP_PORT))",
        expect=stdout("refused\n"),
        is_short=True,
    ),
    Case(
        "loopback-udp",
        "the same by UDP, which needs no connection",
        _KNOCK
        + program("""
            knock(socket.AF_INET, socket.SOCK_DGRAM, ('127.0.0.1', HOST_UDP_PORT))
            try:
                s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                for address in '127.0.0.1 0.0.0.0 255.255.255.255 224.0.0.1'.split():
                    s.sendto(b'hello', (address, HOST_UDP_PORT))
            except OSError: print('refused')
        """),
        expect=stdout("refused\nrefused\n"),
        is_core=True,
    ),
    Case(
        "loopback-others",
        "the same by the other names of the loopback, and without a connection",
        _KNOCK
        + program("""
            for address in ('0.0.0.0', '127.1.2.3', 'localhost'):
                knock(socket.AF_INET, socket.SOCK_STREAM, (address, HOST_TCP_PORT))
            knock(socket.AF_INET6, socket.SOCK_STREAM, ('::1', HOST_TCP_PORT))
            knock(socket.AF_INET6, socket.SOCK_STREAM, ('::ffff:127.0.0.1', HOST_TCP_PORT))
            try:
                with socket.socket() as s: s.sendto(b'x', 0x20000000, ('127.0.0.1', HOST_TCP_PORT))  # MSG_FASTOPEN
            except OSError: print('refused')
        """),
        expect=stdout("refused\n" * 6),
        is_core=True,
    ),
    Case(
        "unix-abstract",
        "a service that listens on an abstract address of the host",
        _KNOCK + "knock(socket.AF_UNIX, socket.SOCK_STREAM, HOST_ABSTRACT)",
        expect=stdout("refused\n"),
        is_short=True,
    ),
    Case(
        "unix-path",
        "the same on a path of the host, such as a container daemon's",
        _KNOCK
        + program("""
            common = '/var/run/docker.sock /run/containerd/containerd.sock /run/dbus/system_bus_socket /tmp/.X11-unix/X0'
            for path in (HOST_UNIX_SOCKET, *common.split()):
                knock(socket.AF_UNIX, socket.SOCK_STREAM, path)
        """),
        expect=stdout("refused\n" * 5),
        is_core=True,
    ),
    Case(
        "outside",
        "the world, by number and by name",
        _KNOCK
        + program("""
            knock(socket.AF_INET, socket.SOCK_STREAM, ('192.0.2.1', 80))
            knock(socket.AF_INET, socket.SOCK_DGRAM, ('198.51.100.1', 53))
            try: socket.getaddrinfo('host.invalid', 80)
            except OSError: print('refused')
        """),
        expect=stdout("refused\n" * 3),
        is_core=True,
    ),
    Case(
        "listen",
        "a neighbour that connects to us: an address of our own",
        program("""
            import socket
            try:
                with socket.create_server(('127.0.0.1', 0)) as s: print('listening')
            except OSError: print('refused')
        """),
        expect=stdout("refused\n"),
        needs="seccomp",
    ),
    Case(
        "neighbours-loopback",
        "the same: two calls that share a loopback talk to each other",
        program("""
            import socket
            try:
                s = socket.create_server(('127.0.0.1', 40_404))
                s.settimeout(0.5)
                s.accept()
                print('a letter came')
            except OSError: print('nothing came')
        """),
        alongside=program("""
            import socket, time
            for _ in range(40):
                time.sleep(0.01)
                try: socket.create_connection(('127.0.0.1', 40_404), 0.1)
                except OSError: pass
        """),
        expect=stdout("nothing came\n"),
        is_core=True,
    ),
    Case(
        "socket-families",
        "the kernel by the protocols that few use and few check",
        program("""
            import errno, socket
            kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
            for family in range(2, 46):
                for kind in kinds:
                    for protocol in (0, 1, 16):
                        try: socket.socket(family, kind, protocol).close()
                        except OSError: continue
                        print('opened', socket.AddressFamily(family).name, kind)
            print('done')
        """),
        expect=stdout("done\n"),
        needs="seccomp",
        is_core=True,
    ),
    Case(
        "netlink",
        "the machine's interfaces and routes, by asking the kernel",
        program("""
            import socket
            try: print(socket.if_nameindex())
            except OSError: print('refused')
            try:
                s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
                s.bind((0, 0))
                s.send(b'\\x14\\0\\0\\0\\x12\\0\\x01\\x03' + bytes(12))
                print(len(s.recv(65536)) > 0)
            except OSError: print('refused')
        """),
        expect=stdout("refused\nrefused\n"),
        needs="seccomp",
    ),
    Case(
        "vsock",
        "the machine that this one runs on",
        _KNOCK + "for cid in (0, 1, 2): knock(socket.AF_VSOCK, socket.SOCK_STREAM, (cid, 1024))",
        expect=stdout("refused\n" * 3),
        is_core=True,
    ),
    Case(
        "crypto-sockets",
        "the kernel's ciphers, the door of several privilege escalations",
        program("""
            import socket
            try:
                s = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
                s.bind(('hash', 'sha256'))
                print('BOUND')
            except OSError: print('refused')
        """),
        expect=stdout("refused\n"),
        needs="seccomp",
        is_core=True,
    ),
    Case(
        "io-uring",
        "every rule about system calls: io_uring makes them on the program's behalf",
        LIBC + f"print(libc.syscall({SYSCALLS['io_uring_setup']}, 8, ctypes.create_string_buffer(248)))",
        expect=stdout("-1\n"),
        needs="seccomp",
        is_core=True,
    ),
    Case(
        "passed-socket",
        "the rule about families: a socket by another constructor",
        program("""
            import socket
            for family in (socket.AF_INET, socket.AF_INET6, 40):
                try: socket.socketpair(family)
                except OSError: print('refused')
            a, b = socket.socketpair()
            a.send(b'allowed')
            print(b.recv(9))
        """),
        expect=stdout("refused\n" * 3 + "b'allowed'\n"),
        is_core=True,
    ),
    Case(
        "pair-as-door",
        "the rule about addresses: the sockets of a pair may not be bound or connected again",
        program("""
            import socket
            a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for attack in (
                lambda: a.connect(HOST_ABSTRACT),
                lambda: a.sendto(b'x', HOST_ABSTRACT),
                lambda: a.sendmsg([b'x'], [], 0, HOST_UNIX_SOCKET),
            ):
                try: attack()
                except OSError: pass
            print('tried')
        """),
        expect=stdout("tried\n"),
        is_core=True,
    ),
    Case(
        "http-client",
        "nothing: a program that asks for a page has to get an error soon, not a wait",
        "import urllib.request\nurllib.request.urlopen('http://host.invalid', timeout=60)",
        wall_s=5.0,
        expect=either(
            error("urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>"),
            error("urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>"),
            error("urllib.error.URLError: <urlopen error [Errno 97] Address family not supported by protocol>"),
        ),
    ),
]
