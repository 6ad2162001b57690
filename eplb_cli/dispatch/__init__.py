"""Which copy of an expert serves a token: the engines' rules, and one that knows how busy the ranks are.

An engine maps a token's logical expert to one of the physical slots that hold it. vLLM takes a hash of the place that
the token has in its batch: on average an even split, whatever the ranks have to do. The `balanced` rule reads the
step's own expert ids instead.

Letters: X layers or batches side by side, W windows, L layers, E logical experts, C most copies of an expert, P slots,
G EP ranks.
"""

from eplb_cli.dispatch.balanced import choose_copies
from eplb_cli.dispatch.copies import Copies
from eplb_cli.dispatch.rules import RULES, Rule
from eplb_cli.dispatch.steps import rank_times, slot_tokens
from eplb_cli.dispatch.windows import loads_under

__all__ = ["RULES", "Copies", "Rule", "choose_copies", "loads_under", "rank_times", "slot_tokens"]
