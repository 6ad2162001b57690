"""Other engines' placement files, both ways, one module an engine."""

from eplb_cli.exports.ascend import Mindie, VllmAscend
from eplb_cli.exports.deepseek import DeepSeek
from eplb_cli.exports.exchange import (
    Exported,
    Facts,
    Imported,
    export_placement,
    import_file,
    import_placement,
    same_placement,
)
from eplb_cli.exports.omni_infer import OmniInfer
from eplb_cli.exports.protocol import Engine, Numbering
from eplb_cli.exports.rtp_llm import RtpLlm
from eplb_cli.exports.sglang import Sglang
from eplb_cli.exports.sidecar import sidecar_of, sidecar_path
from eplb_cli.exports.tensorrt_llm import TensorrtLlm
from eplb_cli.exports.vllm_proposals import VllmJsonl, VllmList

__all__ = [
    "ENGINES",
    "Engine",
    "Exported",
    "Facts",
    "Imported",
    "Numbering",
    "export_placement",
    "import_file",
    "import_placement",
    "same_placement",
    "sidecar_of",
    "sidecar_path",
]

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Sglang(),
        TensorrtLlm(),
        VllmAscend(),
        Mindie(),
        VllmJsonl(),
        VllmList(),
        OmniInfer(),
        RtpLlm(),
        DeepSeek(),
    )
}
"""All known engines. A new one is a module and a line here."""
