"""Makes `math_verify` read LaTeX several times faster, to the same trees.

Nearly all of its time goes into ANTLR's full LL prediction, whose results no cache keeps. SLL prediction is cached, and gives
the same tree or a syntax error (the documentation of ANTLR's PredictionMode; it holds for grammars that read to the end of the
input, as this one does). The same is true of any mixture of the two, decision by decision: where SLL decides otherwise than LL
would, the input cannot be read that way. So the cheap way comes first, and only a syntax error leads to the next.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

# The one rule whose decision needs its context in answers like x^3+3x; full LL everywhere costs ten times as much.
_RULE_IN_CONTEXT = "atom_expr"


def read_faster() -> None:
    """Change it in this process, for good: the parser, and how a number is read."""
    import sympy
    from antlr4.atn.PredictionMode import PredictionMode
    from antlr4.error.Errors import ParseCancellationException
    from antlr4.error.ErrorStrategy import BailErrorStrategy
    from latex2sympy2_extended import latex2sympy2

    class Converter(latex2sympy2._Latex2Sympy):  # type: ignore[misc]
        def create_parser(self, latex: str) -> Any:
            tree = self._try(latex, ()) or self._try(latex, decisions) or super().create_parser(latex).math()
            return SimpleNamespace(math=lambda: tree)

        def _try(self, latex: str, in_context: Collection[int]) -> Any:
            """The tree, by LL prediction of the decisions `in_context` and SLL prediction of others; None after an error."""
            parser = super().create_parser(latex)
            parser._errHandler = BailErrorStrategy()
            simulator, predict = parser._interp, parser._interp.adaptivePredict

            def predict_by_mode(tokens: Any, decision: int, context: Any) -> Any:
                simulator.predictionMode = PredictionMode.LL if decision in in_context else PredictionMode.SLL
                return predict(tokens, decision, context)

            simulator.adaptivePredict = predict_by_mode
            try:
                return parser.math()
            except ParseCancellationException:
                return None

        def parse_number(self, text: str) -> Any:
            digits = text.replace(",", "")
            if digits.isascii() and digits.isdigit():
                return sympy.Integer(digits)  # else sympy would have Python parse it, in a namespace made for that one number
            return super().parse_number(text)

    parser_class = latex2sympy2.PSParser
    decisions = {
        number
        for number, state in enumerate(parser_class.atn.decisionToState)
        if parser_class.ruleNames[state.ruleIndex] == _RULE_IN_CONTEXT
    }
    latex2sympy2._Latex2Sympy = Converter
