"""The text of /metrics in Prometheus' format: vLLM's names under `warpline:`, buckets that begin at 10 µs."""

from __future__ import annotations

import os
import resource
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

#: Upper bounds in seconds, 10 µs to 100 s.
LATENCIES = (*(base * 10.0**power for power in range(-5, 2) for base in (1, 2, 5)), 100.0)
#: Upper bounds of the tokens of a request.
LENGTHS = tuple(float(2**power) for power in range(11))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Histogram:
    """A histogram in Prometheus' sense. Only one thread may write to it."""

    def __init__(self, name: str, meaning: str, bounds: Sequence[float] = LATENCIES):
        self.name, self.meaning, self.bounds = name, meaning, bounds
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self, labels: str) -> Iterable[str]:
        """Yield the lines of its text."""
        yield f"# HELP {self.name} {self.meaning}\n# TYPE {self.name} histogram"
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            le = "+Inf" if bound == float("inf") else f"{bound:.12g}"
            yield f'{self.name}_bucket{{{labels},le="{le}"}} {total}'
        yield f"{self.name}_sum{{{labels}}} {self.sum:.9g}"
        yield f"{self.name}_count{{{labels}}} {total}"


class Metrics:
    """Everything counted by the server. Gauges of engine and queue are read only when /metrics is requested."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.answers: dict[tuple[str, int], int] = {}  # by path and status
        self.first = Histogram("warpline:time_to_first_token_seconds", "From a request to its first token.")
        self.between = Histogram("warpline:inter_token_latency_seconds", "From a token to the next, evenly in a chunk.")
        self.each = Histogram(
            "warpline:request_time_per_output_token_seconds", "Mean of a request after its first token."
        )
        self.whole = Histogram("warpline:e2e_request_latency_seconds", "From a request to its last token.")
        self.decode = Histogram("warpline:request_decode_time_seconds", "From the first token to the last.")
        self.prompt_length = Histogram("warpline:request_prompt_tokens", "Tokens of a prompt.", LENGTHS)
        self.length = Histogram("warpline:request_generation_tokens", "Tokens written.", LENGTHS)
        self.asked_n = Histogram("warpline:request_params_n", "Completions asked for.", COUNTS)
        self.asked_tokens = Histogram("warpline:request_params_max_tokens", "Tokens asked for at most.", LENGTHS)
        self._began = time.time()

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self.answers[path, status] = self.answers.get((path, status), 0) + 1

    def wrote(self, tokens: int, seconds: float) -> None:
        """Count new tokens of a sequence, `seconds` after its last (0 for the first). Called by the engine's thread."""
        self.generation_tokens += tokens
        if seconds:
            self.between.observe(seconds / tokens, tokens)

    def ended(self, reason: str, prompt: int, tokens: int, began: float, first: float, last: float) -> None:
        """Count a sequence that has ended by itself; `began`, `first` and `last` are times in seconds."""
        self.finished[reason] += 1
        self.prompt_length.observe(prompt)
        self.length.observe(tokens)
        self.first.observe(first - began)
        self.whole.observe(last - began)
        self.decode.observe(last - first)
        if tokens > 1:
            self.each.observe((last - first) / (tokens - 1))

    def render(self, model: str, gauges: dict[str, tuple[str, str, float]]) -> str:
        """Return the whole text; `gauges` maps names to meanings, types and current values."""
        name = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'model_name="{name}"'
        lines: list[str] = []

        def counter(name: str, meaning: str, values: dict[str, float]) -> None:
            lines.append(f"# HELP {name} {meaning}\n# TYPE {name} counter")
            lines.extend(f"{name}{{{labels}{more}}} {value:.12g}" for more, value in values.items())

        counter("warpline:prompt_tokens_total", "Tokens of prompts.", {"": self.prompt_tokens})
        counter("warpline:generation_tokens_total", "Tokens written.", {"": self.generation_tokens})
        counter(
            "warpline:request_success_total", "Sequences that have ended, and why.",
            {f',finished_reason="{reason}"': count for reason, count in self.finished.items()},
        )  # fmt: skip
        counter(
            "warpline:http_requests_total", "Answers by path and status.",
            {f',path="{path}",status="{status}"': count for (path, status), count in sorted(self.answers.items())},
        )  # fmt: skip
        for full, (meaning, kind, value) in gauges.items():
            lines.append(f"# HELP {full} {meaning}\n# TYPE {full} {kind}\n{full}{{{labels}}} {value:.12g}")
        for histogram in vars(self).values():
            if isinstance(histogram, Histogram):
                lines += histogram.lines(labels)
        return "\n".join([*lines, *self._process()]) + "\n"

    def _process(self) -> Iterable[str]:
        """Yield the metrics of the process that every exporter has."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        values = (
            ("process_cpu_seconds_total", "counter", used.ru_utime + used.ru_stime),
            ("process_resident_memory_bytes", "gauge", pages * os.sysconf("SC_PAGE_SIZE")),
            ("process_open_fds", "gauge", len(os.listdir("/proc/self/fd"))),
            ("process_start_time_seconds", "gauge", self._began),
        )
        for name, kind, value in values:
            yield f"# HELP {name} Of the process.\n# TYPE {name} {kind}\n{name} {value:.15g}"
