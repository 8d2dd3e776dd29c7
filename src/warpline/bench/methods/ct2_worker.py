"""CTranslate2 in a process of its own, without torch: two OpenMP runtimes in one process slow each other down.

It writes {"ready": true}, then answers every line {"prompts": …, "new": …} with the new ids, and any other line with
its peak memory.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(folder: str, quantization: str, threads: str) -> None:
    """Load the model and answer lines of stdin until it closes."""
    import ctranslate2

    generator = ctranslate2.Generator(
        folder, device="cpu", intra_threads=int(threads), inter_threads=1, compute_type=quantization
    )
    _say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        if "prompts" not in asked:
            _say(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
            continue
        results = generator.generate_batch(
            asked["prompts"],
            max_length=asked["new"],
            end_token=[],  # tokens that end a text do not stop it
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        _say([result.sequences_ids[0] for result in results])


if __name__ == "__main__":
    main(*sys.argv[1:])
