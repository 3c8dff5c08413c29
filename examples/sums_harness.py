"""A harness: asks a served policy sums, eight at once, and writes the share of right answers."""

import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

SUMS = [(first, second) for first in range(4) for second in range(4)]


def is_right(pair):
    body = {"messages": [{"role": "user", "content": f"{pair[0]}+{pair[1]}"}], "temperature": 0, "max_tokens": 24}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    return str(sum(pair)) in text


base_url, file = sys.argv[1:]
with ThreadPoolExecutor(8) as pool:
    right = list(pool.map(is_right, SUMS))
with open(file, "w") as results:
    json.dump({"results": {"right": sum(right) / len(right), "num": len(right)}}, results)
