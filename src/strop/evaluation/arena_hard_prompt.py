"""What the judge of Arena-Hard is asked.

Arena-Hard (Li et al., arXiv 2406.11939) shows the request and two answers, has the judge first answer by itself, then weigh
helpfulness, relevance, concision, creativity and what is missing, and end with one of five verdicts. The words are ours: for
figures that stand beside published ones, give the published prompt as `pair_prompt` of the judge.
"""

PROMPT = """\
You judge two answers, of assistant A and assistant B, to the request below. Say which of them is the better one, and nothing
else counts: not the order in which they stand, and not who may have written them.

1. First answer the request yourself, before you judge anything.
2. Compare both answers with yours, and name what each gets wrong.
3. Ask whether each is helpful (it does what was asked for; where the request can be read in several ways, asking back is better
   than guessing), relevant (all of it belongs to the request) and concise (clear, without padding).
4. Where it matters, ask how original they are. Last, name what is missing from them.

Then give your verdict as one of these five labels:

[[A>>B]] A is much better
[[A>B]] A is a little better
[[A=B]] they are about as good as each other
[[B>A]] B is a little better
[[B>>A]] B is much better

For example: My verdict is a tie: [[A=B]].

<request>
$prompt
</request>

<answer_a>
$a
</answer_a>

<answer_b>
$b
</answer_b>"""
