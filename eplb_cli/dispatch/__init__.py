"""Which copy of an expert serves a token: the engines' rules, and one that knows how busy the ranks are.

An engine maps a token's logical expert to one of the physical slots that hold it. vLLM takes a hash of the place that
the token has in its batch: on average an even split, whatever the ranks have to do. Other engines give each source rank
one copy of every expert. The `balanced` rule reads the step's own expert ids instead.

Letters: X layers or batches side by side, W windows, L layers, E logical experts, C most copies of an expert, P slots,
G EP ranks.
"""

from eplb_cli.dispatch.balanced import choose_copies
from eplb_cli.dispatch.copies import Copies
from eplb_cli.dispatch.engines import SglangDeals, chosen_slots, shares_of_slots, static_shares, usual_shares
from eplb_cli.dispatch.rules import ENGINE_RULES, EVEN_RULES, RULES, STATIC_RULES, Rule, StaticRule
from eplb_cli.dispatch.steps import rank_times, slot_tokens
from eplb_cli.dispatch.tokens import serving_slots
from eplb_cli.dispatch.windows import loads_under

__all__ = [
    "ENGINE_RULES",
    "EVEN_RULES",
    "RULES",
    "STATIC_RULES",
    "Copies",
    "Rule",
    "SglangDeals",
    "StaticRule",
    "choose_copies",
    "chosen_slots",
    "loads_under",
    "rank_times",
    "serving_slots",
    "shares_of_slots",
    "slot_tokens",
    "static_shares",
    "usual_shares",
]
