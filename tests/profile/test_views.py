"""Tree, tables, classes, roofline and verdict of sessions with known answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.profile.conftest import BLOCK, GPT2, MODEL, made_up, stages
from warpline.errors import ConfigError
from warpline.model import cost
from warpline.model.parameters import OPS
from warpline.profile import stamps, tree
from warpline.profile.classify import classes, classify, unknown
from warpline.profile.compare import compare
from warpline.profile.launches import kernel_table, overhead
from warpline.profile.names import hf_path, op_path, path_of, stamp_path
from warpline.profile.render import markdown, picture
from warpline.profile.render.html import page
from warpline.profile.roofline import class_bytes, points, project, whole
from warpline.profile.session import KernelRow, Launches, ModulePath, Session, SpanRow, Work
from warpline.profile.verdict import findings, verdict

LAYERS = GPT2.n_layer


def check_sums(node: tree.Node) -> None:
    if node.children:
        assert sum(child.us for child in node.children.values()) == pytest.approx(node.us, rel=1e-6, abs=1e-6)
    for child in node.children.values():
        check_sums(child)


@pytest.mark.parametrize("merge", [True, False])
def test_children_sum_to_their_parent(recorded: Session, merge: bool) -> None:
    for session in (made_up(gap=2.0), recorded):
        for phase in session.phases:
            root = tree.build(phase, merge=merge)
            check_sums(root)
            assert root.us == pytest.approx(phase.step_us, rel=0.02)
            assert merge or {f"h.{i}" for i in range(session.config.n_layer)} <= set(root.children)


def test_layers_merged_and_apart() -> None:
    phase = made_up(gap=1.0).phases[0]
    together, apart = tree.build(phase), tree.build(phase, merge=False)
    block = together.find("transformer blocks")
    assert block is not None
    assert block.us == pytest.approx(LAYERS * (sum(BLOCK.values()) + len(BLOCK)))
    attention = apart.find("h.7", "attention")
    assert attention is not None
    assert attention.us == sum(us + 1 for path, us in BLOCK.items() if path[0] == "attention")


def test_self_is_what_the_parts_leave() -> None:
    session = made_up()
    phase = session.phases[0]
    more = replace(phase, spans=(*phase.spans, SpanRow(("h.0", "attention"), 3.0, 1.0), SpanRow((), 0.0, 5.0)))
    root = tree.build(more)
    check_sums(root)
    own = root.find("transformer blocks", "attention", tree.SELF)
    assert own is not None
    assert (own.busy_us, own.gap_us, root.children[tree.SELF].us) == (3.0, 1.0, 5.0)


def test_the_four_tables_have_the_rows_of_the_reference_systems() -> None:
    parts: dict[ModulePath, float] = {("attention", n): 1.0 for n in ("scores", "mask", "softmax", "values")}
    gone: dict[ModulePath, float] = {("attention", "fused attention"): 0.0, ("attention", "KV cache"): 0.0}
    session = made_up(change=parts | gone, work=Work(64, 0, 64, naive=True))
    found = {table.title: {name for name, _, _ in table.rows} for table in tree.tables(session.phases[0])}
    assert found == {
        "model": {"transformer blocks", "LM head", "final LN", "token embedding", "add", "position embedding"},
        "block": {"attention", "MLP", "LN1", "LN2", "residual 1", "residual 2"},
        "attention": {
            *("QKV projection", "mask", "scores", "output projection", "values", "output reshape"),
            *("QKV reshape", "softmax"),
        },
        "MLP": {"activation", "projection", "expansion"},
    }
    for table in tree.tables(session.phases[0]):
        assert sum(share for _, _, share in table.rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "GEMM"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm", "reduction"),
        ("aten::add_", "elementwise"),
        ("aten::as_strided", "memory"),
        ("aten::brand_new", "other"),
        ("warpline_layernorm_matvec_bias_gelu", "GEMM"),
        ("warpline_append_attention", "attention"),
        ("warpline_append_attention_int8", "attention"),
        ("warpline_quantise_kv", "memory"),
        ("warpline_residual_layernorm", "reduction"),
        ("warpline_newest_embedding", "memory"),
        ("warpline_matvec_bias_residual_int8", "GEMM"),
        ("warpline_expand", "memory"),
        ("warpline_admit", "memory"),
        ("warpline_report", "memory"),
        ("void gemv2T_kernel_val<int, int, float>", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "GEMM"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, float, float>(Params)", "GEMM"),
        ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNN", "GEMM"),
        ("graph_0_cpp_fused_add_native_layer_norm_view_4", "reduction"),
        ("graph_0_cpp_fused_addmm_gelu_view_2", "elementwise"),
        ("warpline_decode: heads gathered", "exchange"),
        ("warpline_decode: gathered, computed, posted", "attention"),
        ("warpline_cpu_decode", "GEMM"),
        ("warpline_cpu_prefill", "GEMM"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<float>", "reduction"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "memory"),
        ("triton_red_fused_mm_native_layer_norm_3", "reduction"),
        ("triton_poi_fused_addmm_gelu_5", "elementwise"),
        ("Memcpy DtoH (Device -> Pinned)", "memory"),
        ("mystery_kernel", "other"),
    ],
)
def test_classes_by_name(name: str, kind: str) -> None:
    assert classify(name) == kind


def test_time_per_class_sums_and_strangers_are_listed() -> None:
    session = made_up()
    phase = session.phases[0]
    strange = replace(phase, kernels=(*phase.kernels, KernelRow("mystery_kernel", (), 1.0, 7.0, 7.0)))
    found = {row.kind: row for row in classes(strange)}
    assert found["GEMM"].us == LAYERS * (5 + 2 + 6 + 6) + 40
    assert sum(row.us for row in found.values()) == pytest.approx(phase.busy_us + 7)
    assert sum(row.share for row in found.values()) == pytest.approx(1)
    assert unknown(strange) == ["mystery_kernel"]
    assert class_bytes(session, phase)["GEMM"] > 0.9 * cost.total_bytes(session.workload(phase))


def test_roofline_prices_every_step_once() -> None:
    session = made_up()
    phase = session.phases[0]
    found = points(session, phase)
    priced = cost.costs(session.workload(phase))
    assert sum(point.flops for point in found) == sum(price.flops for price in priced)
    assert sum(point.bytes for point in found) == sum(price.bytes for price in priced)
    head = next(point for point in found if point.name == "LM head")
    assert head.gb_s == pytest.approx(next(p for p in priced if p.step.name == "LM head").bytes / 40e-6 / 1e9)
    assert (head.bound, round(head.share, 2)) == ("memory", 0.48)
    assert next(point for point in found if point.name == "ln_1").bound == "latency"
    assert whole(session, phase).us == phase.step_us


def test_fused_kernels_have_the_price_of_their_steps() -> None:
    session = made_up()
    phase = session.phases[0]
    fused = tuple(
        replace(row, path=(*row.path[:-1], "ln_1 + QKV projection")) if row.path[-1] == "QKV projection" else row
        for row in phase.spans
        if row.path[-1] != "ln_1"
    )
    found = {point.name: point for point in points(session, replace(phase, spans=fused))}
    apart = {point.name: point for point in points(session, phase)}
    joint = found["ln_1 + QKV projection"]
    assert joint.flops == apart["ln_1"].flops + apart["QKV projection"].flops
    assert apart["QKV projection"].bytes < joint.bytes < apart["ln_1"].bytes + apart["QKV projection"].bytes


def test_projection() -> None:
    session = made_up()
    target, rows = project(session, session.phases[0], "t4")
    assert (target.name, target.read_gb_s, target.measured) == ("Tesla T4", 320, False)
    head = next(row for row in rows if row.name == "LM head")
    assert head.expected_us == pytest.approx(40 * 4000 / 320)
    assert next(row for row in rows if row.name == "ln_1").expected_us is None
    with pytest.raises(ConfigError, match="nothing is known of a GPU called 'abacus'"):
        project(session, session.phases[0], "abacus")
    for dtype in ("bf16", "int8"):
        with pytest.raises(ConfigError, match=f"nothing computes in {dtype} on Tesla T4"):
            project(made_up(dtype=dtype), session.phases[0], "t4")


def test_overhead_and_kernels() -> None:
    session = made_up(gap=3.0)
    phase = session.phases[0]
    spent = overhead(phase)
    assert spent.busy_share == pytest.approx(1 - spent.gap_us / spent.step_us)
    count = LAYERS * len(BLOCK) + len(MODEL)
    assert spent.gap_us == pytest.approx(3 * count)
    assert spent.busy_us + spent.gap_us == pytest.approx(spent.step_us)
    assert spent.host_us_per_launch == 3.0
    lines = kernel_table(session, phase)
    assert sum(line.us for line in lines) == pytest.approx(phase.busy_us, rel=0.02)
    line = next(line for line in lines if line.module[-1] == "expansion")
    assert (line.calls, line.per_layer, line.kind, line.mean_us) == (LAYERS, 1, "GEMM", 6)
    assert next(line for line in lines if line.module == ("LM head",)).per_layer is None


# --- verdicts ---------------------------------------------------------------------------------------------------------

PARTS: dict[ModulePath, float] = {
    ("attention", "scores"): 20.0,
    ("attention", "mask"): 20.0,
    ("attention", "softmax"): 20.0,
    ("attention", "values"): 20.0,
    ("attention", "fused attention"): 0.0,
}


def at_the_limit() -> Session:
    """Return a phase in which each module takes what its bytes and FLOPs need."""
    session = made_up()
    roof = {point.name: point.roof_us for point in points(session, session.phases[0])}
    change = {path: roof[path[-1]] / (LAYERS if path in BLOCK else 1) for path in [*BLOCK, *MODEL]}
    return made_up(change=change)


@pytest.mark.parametrize(
    ("session", "kind", "saved"),
    [
        (made_up(gap=20.0), "gaps", 20.0 * (LAYERS * len(BLOCK) + len(MODEL))),
        (made_up(change=PARTS, work=Work(1, 128, 1, naive=True)), "attention in parts", 80.0 * LAYERS),
        (made_up(change={("ln_1",): 50.0, ("ln_2",): 50.0}), "small steps", 107.0 * LAYERS + 3),
        (made_up(change={("MLP", "expansion"): 90.0}), "weight streaming", None),
        (made_up(name="prefill", scale=40.0, work=Work(1024, 0, 1, naive=False)), "slow products", None),
        (made_up(change={("attention", "fused attention"): 90.0}), "attention", 90.0 * LAYERS),
        (made_up(), "short kernels", None),
        (made_up(kind="cpu", gap=20.0), "host", 20.0 * (LAYERS * len(BLOCK) + len(MODEL))),
    ],
    ids=["gaps", "parts", "small", "weights", "products", "attention", "short", "host"],
)
def test_the_first_bottleneck_is_named(session: Session, kind: str, saved: float | None) -> None:
    phase = session.phases[0]
    best = findings(session, phase)[0]
    assert best.kind == kind
    assert 0 < best.saved_us < phase.step_us
    if saved is not None:
        assert best.saved_us == pytest.approx(saved, rel=0.05)
    text = verdict(session, phase)
    assert best.cause in text
    assert f"{best.after_us:,.0f} µs" in text
    assert "\n" not in text


def test_short_kernels_cost_what_they_take_beyond_their_share_of_the_roof() -> None:
    """All kernels except the head's 40 µs are short."""
    session = made_up()
    phase = session.phases[0]
    best = findings(session, phase)[0]
    spent = phase.step_us - 40
    assert f"{LAYERS * len(BLOCK) + 4} kernels" in best.cause
    assert best.saved_us == pytest.approx(spent * (1 - whole(session, phase).roof_us / phase.step_us))


def persistent(gathered: float, multiplied: float) -> Session:
    """One launch whose stages take as long as that."""
    modules = stages(LAYERS)
    each = {p: gathered if classify(stamps.kernel_name(p)) == "exchange" else multiplied for p in modules}
    step, work = sum(each.values()), Work(1, 128, 1, naive=False)
    phase = stamps.stamped_phase("decode", each, 1 / 9, 8, [step], step, work)
    return made_up(method="persistent", phases=(phase,))


def test_exchanges_of_the_persistent_kernel_are_named() -> None:
    session = persistent(2.0, 1.2)
    phase = session.phases[0]
    best = findings(session, phase)[0]
    count = 4 * LAYERS + 2
    assert (best.kind, best.saved_us) == ("exchanges", 2.0 * count)
    assert f"{count} times a step" in best.cause
    assert picture.shares(phase)["exchanges"] == pytest.approx(2.0 * count)
    assert {row.kind for row in classes(phase)} == {"exchange", "GEMM", "attention"}
    assert not unknown(phase)


def test_without_exchanges_the_memory_is_still_to_be_read() -> None:
    session = persistent(2.0, 0.1)
    phase = session.phases[0]
    best = findings(session, phase)[0]
    assert best.kind == "exchanges"
    assert best.after_us == pytest.approx(whole(session, phase).roof_us)


def test_slow_stages_of_the_persistent_kernel_are_no_exchanges() -> None:
    session = persistent(0.2, 9.0)
    assert findings(session, session.phases[0])[0].kind == "weight streaming"


@pytest.mark.parametrize("launches", [Launches(1, 9.0, 1, 161), Launches(5, 60.0, 3, 91)], ids=["step", "prompt"])
def test_gaps_of_a_graph_are_not_cured_by_a_graph(launches: Launches) -> None:
    session = made_up(gap=20.0)
    phase = replace(session.phases[0], launches=launches)
    best = findings(session, phase)[0]
    assert best.kind == "gaps"
    assert "Capture" not in best.remedy
    assert "between its kernels" in best.cause


def test_what_recording_costs_is_no_gap() -> None:
    """Unrecorded, the step takes half as long: the other half is the recorder's cost."""
    session = made_up(gap=20.0)
    phase = session.phases[0]
    freed = replace(phase, plain_us=phase.busy_us + 0.25 * phase.gap_us)
    best = findings(replace(session, phases=(freed,)), freed)[0]
    assert best.kind == "gaps"
    assert best.saved_us == pytest.approx(0.25 * phase.gap_us)
    assert best.step_us == freed.plain_us


def test_without_kernels_gaps_are_between_modules() -> None:
    """As in a phase recorded with CUDA events because CUPTI is missing."""
    session = made_up(gap=20.0, source="events")
    blind = replace(session.phases[0], kernels=(), launches=Launches())
    session = replace(session, phases=(blind,))
    assert "those inside them were not seen" in findings(session, blind)[0].cause
    text = markdown.whole(session)
    assert "CUPTI is not available" in text
    assert "kernels per step" not in text
    assert "transformer blocks" in page(session)


def test_no_cache_is_named() -> None:
    session = made_up(work=Work(500, 0, 500, naive=False), scale=40.0)
    best = findings(session, session.phases[0])[0]
    assert best.kind == "no KV cache"
    assert "500 positions" in best.cause
    assert 0.5 * session.phases[0].busy_us < best.saved_us < session.phases[0].busy_us


def test_half_precision_is_proposed_where_memory_binds() -> None:
    session = made_up(dtype="fp32", read_gb_s=4000, scale=1.2)
    roof = {point.name: point.roof_us for point in points(session, session.phases[0])}
    change = {path: 1.1 * roof[path[-1]] / (LAYERS if path in BLOCK else 1) for path in [*BLOCK, *MODEL]}
    session = made_up(dtype="fp32", change=change)
    best = findings(session, session.phases[0])[0]
    assert best.kind == "fp32"
    assert best.saved_us == pytest.approx(session.phases[0].step_us / 2, rel=0.05)


def test_at_the_limit_nothing_is_proposed() -> None:
    session = at_the_limit()
    text = verdict(session, session.phases[0])
    assert "The memory is the only limit" in text


# --- names ------------------------------------------------------------------------------------------------------------


def test_paths() -> None:
    assert {path_of(step, None if step.scope == "model" else 3) for step in OPS} >= {
        ("h.3", "attention", "QKV projection"),
        ("h.3", "MLP", "activation"),
        ("h.3", "residual 1"),
        ("LM head",),
    }
    assert hf_path("transformer.h.3.attn.c_attn") == ("h.3", "attention", "QKV projection")
    assert hf_path("transformer.h.3") == ("h.3",)
    assert hf_path("lm_head") == ("LM head",)
    assert hf_path("transformer.drop") is hf_path("transformer.h.0.attn.attn_dropout") is None
    assert stamp_path("out: heads gathered", 2)[:2] == ("h.2", "attention")
    assert op_path("sample", (), None) == ("sample",)
    assert op_path("residual_layernorm", ("h.4.ln_1.weight",), None) == ("h.3", "residual 2 + ln_1")
    assert op_path("matmul", ("ln_f.out", "wte.weight"), None) == ("LM head",)


def test_comparison() -> None:
    before, after = made_up(gap=5.0), made_up(change={("LM head",): 20.0})
    (found,) = compare(before, after)
    step = found.modules[0]
    assert (step.name, step.depth) == ("step", 0)
    assert step.difference == pytest.approx(after.phases[0].step_us - before.phases[0].step_us)
    head = next(change for change in found.modules if change.name == "LM head")
    assert (head.before, head.after, head.ratio) == (45.0, 20.0, 20 / 45)
    assert not found.notes
    other = replace(after, dtype="fp32", phases=(replace(after.phases[0], name="prefill"),))
    with pytest.raises(ConfigError, match="no phase in common"):
        compare(before, other)
    (noted,) = compare(before, replace(after, dtype="fp32"))
    assert noted.notes == ("dtype: fp16 before, fp32 after",)
