"""Compare the story model with its teacher on held-out stories, and count how often its own stories end.

python -m tools.train_stories.evaluate --model run/stories --teacher teacher.safetensors --held-out data/held_out.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

from tools.train_stories.openings import opening
from tools.train_stories.teacher import Teacher
from warpline import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--teacher", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--stories", type=int, default=2000, help="held-out stories to score")
    parser.add_argument("--samples", type=int, default=256, help="stories to write and count")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()

    lines = options.held_out.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line) for line in lines[: options.stories]]
    teacher = Teacher.load(options.teacher, options.device, torch.float32)
    # A text beyond the teacher's context would be cut for it but not for the student.
    texts = [text for text in texts if len(teacher.encode(text)) < teacher.context]
    llm = LLM(options.model, device=options.device, dtype="fp32", max_batch=128)

    student = llm.score(texts)
    nats, characters = teacher.nll(texts)
    if characters != student.characters:
        raise SystemExit(f"scored on different texts: {student.characters} and {characters} characters")
    report = {
        "held_out_stories": len(texts),
        "characters": characters,
        "student_nats_per_character": student.nats_per_character,
        "teacher_nats_per_character": nats / characters,
        "student_nats_per_token": student.nats_per_token,
        "student_perplexity": student.perplexity,
    }

    rng = random.Random(0)
    prompts = [opening(rng) or "Once upon a time" for _ in range(options.samples)]
    for name, params in (
        ("greedy", SamplingParams(temperature=0, max_tokens=400)),
        ("sampled", SamplingParams(max_tokens=400, seed=1)),
    ):
        written = llm.generate(prompts, params)
        ended = sum(completion.finish_reason == "stop" for completion in written)
        report[f"{name}_stories_that_end_by_themselves"] = ended / len(written)
        report[f"{name}_mean_tokens"] = sum(len(completion.token_ids) for completion in written) / len(written)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
