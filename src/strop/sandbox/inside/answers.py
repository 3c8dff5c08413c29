r"""Answers as problem sets have them, for `verify.prime`: a child inherits the grammar paths that were taken before it."""

from __future__ import annotations

# One of each common kind.
FORMS = r"""
7 | -12 | 0.25 | -3.5 | 1,234 | 10\% | 45^\circ | 60^{\circ} | \$5.50 | 12\text{ cm} | 3\text{ inches} | 15 \mbox{ cm}^2
2.5 \text{ hours} | \frac{1}{2} | -\frac{3}{4} | \dfrac{7}{9} | \tfrac{2}{3} | \frac12 | \frac{1}{\sqrt{2}} | 1/2 | -3/4
2\frac{1}{3} | \frac{14}{3}+1 | \frac{9}{7}-2 | \sqrt{2} | 3\sqrt{5} | -\sqrt{7}+1 | \sqrt[3]{4} | 2 + 3\sqrt{2}
\frac{1+\sqrt{5}}{2} | \frac{\sqrt{3}}{3} | 4\sqrt{2}-4 | \sqrt{x^2+1} | \sqrt2 | \pi | 2\pi | \frac{\pi}{6}
-\frac{5\pi}{12} | 3\pi + 2 | 16\pi-8 | \pi/4 | e | e^2 | e^{-x} | 2e^{3x} | \ln 2 | \ln(3) | \log_2 8 | \log 10 | \ln(x+1)
2^{10} | 3^{n+1} | x^2 | x^{-1} | (x+1)^2 | (x-2)(x+3) | 5! | \binom{5}{2} | \dbinom{n}{k} | 10^{-3} | 2^5 \cdot 3^2
3 \times 10^8 | 6 \cdot 7 | p - q | -q+p | a+b | 2x+3 | x^2 - 5x + 6 | x^3+3x-6 | -2x^2+x-1 | 6r^2-4r-24 | \frac{x+1}{x-1}
\frac{a}{b} | 3xy^2 | 2ab | x+y+z | \frac{11+9a}{20} | x = 5 | x=-\frac{1}{2} | y = 2x + 3 | x=1+\sqrt{2} | y=-x^2+4
f(x) = x^2 | x^2+y^2=25 | \frac{x^2}{4}+\frac{y^2}{9}=1 | a=1,b=2 | x=1, y=2 | n = 1,2,3 | x > 1 | x \le 3 | x \geq -2
1 < x < 2 | 0 \le x \leq 5 | x \ne 0 | x < -1 \text{ or } x > 2 | a \in [1,2] | x \in [-2,7] | x \in (1,\infty) | x \approx 3
(1,2) | (3, \frac{\pi}{2}) | \left( 3, \frac{\pi}{2} \right) | (-1,0,2) | \left(-\frac{1}{2}, \sqrt{3}\right) | (2x, y)
(a,b,c) | (6,31,-1) | (5,-1)+1 | [1,2] | [0,1) | (0,1] | (-\infty, 3] | (2,\infty) | [-2, \frac{1}{3}]
(-\infty,-1)\cup(1,\infty) | (-\infty, 2] \cup [3, 4) | \left[ -\sqrt{3}, \sqrt{3} \right]
\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right] | [0,1] \cup \{2\} | (-\infty,0)\cup(0,3)\cup(3,\infty) | 1,2 | 1, -2, 3
\{1,2,3\} | \{1, 2\} | \left\{-1, \frac{1}{2}\right\} | 2 \text{ and } 3 | \pm 3 | 1 \pm \sqrt{2} | \{1\pm\sqrt{5},-2\}
-1, \sqrt{2} | \emptyset | \frac{3}{2},-1 | i | 2+3i | 6 - 5i | -i | \frac{1+i}{2} | 1 \pm 2i | e^{i\pi}
3(\cos\theta + i\sin\theta) | -2+7i | \sin x | \cos(2x) | \tan^2 x | \sin^2\theta | \cos \frac{\pi}{3} | \sec x | \cot y
\arcsin x | \tan^{-1}(2) | \sin 2x + \cos x | \frac{\sin x}{x} | \cos^{-1} \frac{1}{3} | |x| | |x-2| | \lfloor x \rfloor
\lceil 3.2 \rceil | \max(1,2) | \gcd(4,6) | \left|\frac{a}{b}\right| | \infty | -\infty | \theta | \alpha+\beta | \lambda x
x_1 | a_n | x_{12} | \text{A} | \text{(C)} | \text{Evelyn} | \text{even} | \text{odd} | \text{Yes} | \text{none} | \text{east}
\mathrm{B} | (D) | C | \textbf{(A)} | abc | \text{a square} | x^2 \text{ units} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & -4 \end{pmatrix} | \begin{bmatrix} a & b \\ c & d \end{bmatrix}
\begin{pmatrix} -1/3 \\ \frac{2}{3} \\ 5 \end{pmatrix} | 204_5 | 101_2 | 1\underline{2}3 | 3:4 | 2:30 | 11\!,\!111 | 1{,}000
12. | \frac{3}{56}x^8 | \int_0^1 x dx | \sum_{k=1}^{n} k | \lim_{x \to 0} x | \frac{d}{dx} x^2 | f'(x)
\frac{270}{7}\text{ degrees} | 4210_{5} | x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1 | 2(x-1)(x+4)^2 | \frac{\sqrt{21}}{5}+\frac{2}{3}
3-2\sqrt{2} | \left(\frac{3}{4}\right)^3 | 10,\!080 | 0.\overline{3} | (x - 3)^2 + (y+1)^2 = 16
y = \frac{1}{2}x - \frac{7}{2} | 5x - 7y + 11z + 4 = 0 | z^3 + z^2 - 12 | \frac{1}{x^2-1} | n(n+1) | \frac{n(n-1)}{2} | 2k\pi
\frac{\pi}{2}+k\pi, k\in\mathbb{Z} | \mathbb{R} | x=7 | x=-12 | x=0.25 | x=\frac{3}{4} | x=\pm 3 | x=2\sqrt{5} | x=\pi
x=x^2+1 | x=1,2 | x=(1,2) | y=(3,\frac{\pi}{2}) | x=45^\circ | k=10\% | x=\text{A} | x=2+3i | x=2ab | x=\frac{x+1}{x-1}
x=\sqrt{x} | x=e^2 | n=5! | x=\frac{\pi}{6} | x=\begin{pmatrix} 1 \\ 2 \end{pmatrix} | x=[1,2] | x=(1,\infty) | x=\{1,2\}
x=\sin x | x=|x| | x=a_n | x=2^{10}
(-\sqrt{2}, \sqrt{5}) | \left( \frac{1}{2}, -7 \right) | \left(\frac{1}{5},\frac{4}{3}\right] | \left[ -\frac{1}{2}, 3 \right)
(2,8) \cup (8,20) | \left( -\infty, \frac{1}{2} \right] | (-\infty, 4) \cup (7, \infty) | (-3, 4) | (0.5, -2) | (\sqrt{2}, \pi)
x = (-3, 4) | x = (-\sqrt{2}, \sqrt{5}) | x = \left( \frac{1}{2}, -7 \right) | x = \left(\frac{1}{5},\frac{4}{3}\right]
x = (-\infty, 4]
x = \left[ \frac{\pi}{3}, \frac{2 \pi}{5} \right] | x = (2,8) \cup (8,20) | x = \{2\pm\sqrt{3},-1\}
x = \left( 4, \frac{\pi}{3} \right)
x = \begin{pmatrix} 1 & 0 \\ 0 & -2 \end{pmatrix} | x = \begin{pmatrix} -3 \\ -7 \\ 5 \end{pmatrix}
\begin{pmatrix} -3 \\ -7 \\ 5 \end{pmatrix}
x = \begin{pmatrix} -2/3 \\ 1/5 \end{pmatrix} | x = \begin{pmatrix} 12/25 \\ 3/5 \\ 7/8 \end{pmatrix}
\begin{pmatrix} 12/25 \\ 3/5 \end{pmatrix}
x = (a+3)(b+4) | (a+3)(b+4) | x = -\sqrt{5} | x = \frac{\sqrt{5}}{2} | x = \frac{2\sqrt{5}}{7} | \frac{2\sqrt{5}}{7}
x = \frac{\sqrt{30}}{7}
x^4 - x^3 + x^2 - x + 1 | x = x^4 - x^3 + x^2 - x + 1 | x^4 + x^3 + x^2 + x + 1 | x = x^4 + x^3 + x^2 + x + 1 | x = 3120_{4}
x^6 + x^5 + x^4 + x^3 + x^2 + x + 1 | x = x^6+x^5+x^4+x^3+x^2+x+1 | x = \cot x | x = 5n^2 + 3n + 1 | x = \frac{700}{\pi}
x = 3\sqrt2
"""

# Gold and answer: comparisons that end in different places, by numbers, algebra, sets, intervals, relations, matrices, symbols.
COMPARISONS = r"""
\frac{1}{2} | 0.5 || \frac{1}{3} | 0.333333 || \frac{2}{3} | \frac{4}{6} || \sqrt{8} | 2\sqrt{2} || (x+1)^2 | x^2+2x+1
p-q | q-p || x=5 | 5 || 5 | x=5 || \frac{1}{\sqrt{2}} | \frac{\sqrt{2}}{2} || 1,2 | 2,1 || \{1,2\} | \{2,1\} || (1,2) | (1,3)
1<x<2 | (1,2) || x>1 | (1,\infty) || [0,1] | [0,1) || 2\pi | 6.28 || x=1 | y=1 || y=2x+3 | 2x-y+3=0 || x \le 3 | 3 \ge x
\text{even} | even || \text{A} | B || 10\% | 0.1 || 10 | 10\% || \frac{x+1}{x-1} | 1+\frac{2}{x-1}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix} 1.0 \\ 2 \end{pmatrix} || 6-5i | -5i+6 || \sin^2 x+\cos^2 x | 1
e^{i\pi} | -1 || \binom{5}{2} | 10 || 3^4 | 81 || -\frac{\pi}{6} | x=-\frac{\pi}{6} || 1\pm\sqrt{2} | 1+\sqrt{2},1-\sqrt{2}
(-\infty,-1)\cup(1,\infty) | (1,\infty)\cup(-\infty,-1) || x^3+3x-6 | x^3+3x-5 || 2x=4 | x=2 || \frac{9}{7} | 1\frac{2}{7}
\log_2 8 | 3 || \sqrt{2}+1 | 2.41421356 || 4495 | x^8+x+1 || (3,4) | 3,4 || \frac{11+9a}{20} | \frac{9a+11}{20}
x \in [-2,7] | [-2,7] || 45^\circ | 45 || 7 | \sqrt{5} || \sqrt{5} | 7 || 7 | \frac{\sqrt{5}}{2} || \frac{\sqrt{5}}{2} | 7
\frac{3}{5} | 2\sqrt{7} || 2\sqrt{7} | \frac{3}{5} || 7 | \frac{5}{\pi} || \frac{5}{\pi} | 30^\circ || 5+2i | 7 || 7 | 5-2i
7 | 8 \pi || 8 \pi | 7 || 3 | \cot x || \cot x | 3 || 7 | 5n^2+3n+1 || 5n^2+3n+1 | -7 || 7 | 5x-20 || 7 | (2,8) \cup (8,20)
(-\sqrt{2}, \sqrt{5}) | 7 || 7 | (-\infty, 4) \cup (7, \infty) || y = 3x+1 | x = y = 3x+1 || y = 3x+1 | 1 + y = 3x
y = -3x | x = y = -3x
2x - 5y + 3z + 1 = 0 | x = 2x - 5y + 3z + 1 = 0 || x^4+x^3+x^2+x+1 | 7 || 1+2\sqrt{5} | 5.47 || 3120_{4} | \sqrt{5}
(a+3)(b+4) | 7
3, 5, 7 | \text{(B)} || 10,\!500 | \frac{\sqrt{30}}{7} || \left[ \frac{\pi}{3}, \frac{2 \pi}{5} \right] | 5+2i
3\sqrt2 | \frac{5}{8}
"""


def forms() -> list[str]:
    return _cells(FORMS, " | ")


def comparisons() -> list[list[str]]:
    """Pairs of gold and answer."""
    return [pair.split(" | ") for pair in _cells(COMPARISONS, " || ")]


def _cells(table: str, separator: str) -> list[str]:
    return [cell.strip() for row in table.strip().splitlines() for cell in row.split(separator)]
