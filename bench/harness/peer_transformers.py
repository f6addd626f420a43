"""transformers as a peer (see peers.py): python peer_transformers.py MODEL.gguf THREADS"""

import json
import sys
import time
from pathlib import Path

import torch
import transformers

MODEL, THREADS = Path(sys.argv[1]), int(sys.argv[2])


def say(**answer: object) -> None:
    print("peer: " + json.dumps(answer), flush=True)


@torch.inference_mode()
def measure(
    model: transformers.PreTrainedModel, context: int, batch: int, tokens: int
) -> dict[str, float]:
    """Tokens/s of a greedy loop over its own cache."""
    ids = torch.randint(model.config.vocab_size, (batch, context))
    began = time.perf_counter()
    cache = None
    for start in range(0, context, 512):  # logits of the last token only, and bounded memory
        out = model(ids[:, start : start + 512], past_key_values=cache, logits_to_keep=1)
        cache = out.past_key_values
    prefilled = time.perf_counter()
    for _ in range(tokens):
        ids = out.logits[:, -1:].argmax(dim=-1)
        out = model(ids, past_key_values=out.past_key_values)
    decoded = time.perf_counter()
    return {
        "prefill": batch * context / (prefilled - began),
        "decode": batch * tokens / (decoded - prefilled),
    }


def main() -> None:
    torch.set_num_threads(THREADS)
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL.parent, gguf_file=MODEL.name, dtype=torch.bfloat16
    )
    measure(model, 16, 1, 2)
    say(name=f"transformers {transformers.__version__}")
    for line in sys.stdin:
        context, batch, tokens = map(int, line.split())
        say(**measure(model, context, batch, tokens))


if __name__ == "__main__":
    main()
