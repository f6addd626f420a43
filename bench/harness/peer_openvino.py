"""OpenVINO GenAI as a peer (see peers.py): python peer_openvino.py MODEL.gguf THREADS

Continuous batching, timed step by step: prefill until every request has a token, then decode. It
computes and caches in bfloat16 where the processor has it and in float32 where it hasn't, which the
name says.
"""

import json
import random
import sys
import time

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

MODEL, THREADS = sys.argv[1], int(sys.argv[2])
VOCABULARY = 49_152
CACHE_GIB = 3
BATCHED_TOKENS = 2048


def say(**answer: object) -> None:
    print("peer: " + json.dumps(answer), flush=True)


def open_pipeline() -> tuple[genai.ContinuousBatchingPipeline, str]:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if has_bf16 else "f32"
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": THREADS,
    }
    pipeline = genai.ContinuousBatchingPipeline(
        MODEL, scheduler_config=scheduler, device="CPU", properties=properties
    )
    return pipeline, precision


def measure(
    pipeline: genai.ContinuousBatchingPipeline, context: int, batch: int, tokens: int
) -> dict[str, float]:
    """Tokens/s. A request that is prefilled while others still are decodes meanwhile: only steps
    after the last prefill, with the whole batch, count."""
    config = genai.GenerationConfig()
    config.ignore_eos, config.do_sample = True, False
    # Those that come first decode while the others are prefilled, and must outlast them.
    config.max_new_tokens = tokens + batch * context // BATCHED_TOKENS + 2
    handles = []
    for request in range(batch):
        ids = np.array([[random.randrange(VOCABULARY) for _ in range(context)]], dtype=np.int64)
        handles.append(pipeline.add_request(request, ov.Tensor(ids), config))
    began = time.perf_counter()
    waiting = set(range(batch))
    while waiting:
        pipeline.step()
        waiting -= {i for i in waiting if handles[i].can_read()}
    prefilled = time.perf_counter()
    for _ in range(tokens):
        pipeline.step()
    decoded = time.perf_counter()
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return {
        "prefill": batch * context / (prefilled - began),
        "decode": batch * tokens / (decoded - prefilled),
    }


def main() -> None:
    pipeline, precision = open_pipeline()
    measure(pipeline, 16, 1, 2)
    say(name=f"OpenVINO GenAI {genai.__version__.split('-')[0]} ({precision})")
    for line in sys.stdin:
        context, batch, tokens = map(int, line.split())
        say(**measure(pipeline, context, batch, tokens))


if __name__ == "__main__":
    main()
