"""What a model is, from config.json and headers: no weights, no torch, no work."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from onboard import display, twins
from onboard.architectures import Architecture, Role, by_model_type, families
from onboard.architectures.table import canonical, generate
from onboard.checkpoint.declared import declared
from onboard.configkeys import unknown_keys
from onboard.errors import InputError
from onboard.inspection import inspect
from onboard.lookup import PUBLISHED, find
from onboard.recipe import resolve
from tests import hub_server
from tests.hub_server import SHA, Hub
from tests.shards import Shapes, write_index, write_model, write_shard

QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "tie_word_embeddings": False,
}
RENAMED = {  # modules, as a new family might call them
    "self_attn": "mixer",
    "mlp.experts": "moe.bank",
    "mlp.gate.": "moe.router.",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "input_layernorm": "norm_in",
    "post_attention_layernorm": "norm_out",
}


def shapes_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    rules = families()[by_model_type()[config["model_type"]]]
    return {tensor.name: tensor.shape for tensor in generate(rules, config["model_type"], config)}


def renamed(name: str, words: Mapping[str, str] = RENAMED) -> str:
    for old, new in words.items():
        name = name.replace(old, new)
    return name


def load(file: Path) -> Architecture:
    """Import an architecture file from where it was written."""
    spec = importlib.util.spec_from_file_location(f"written_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rules = module.ARCHITECTURE
    assert isinstance(rules, Architecture)
    return rules


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_model(tmp_path / "moe", shapes_of(QWEN3_MOE), QWEN3_MOE)


# Known families


def test_a_local_directory(moe: Path) -> None:
    facts = inspect(find(str(moe)))
    assert facts["verdict"] == "supported"
    assert (facts["family"], facts["model_type"]) == ("qwen3_moe", "qwen3_moe")
    assert facts["experts"] == {"used": 2, "of": 8}
    expert, dense = 3 * 48 * 64, 3 * 96 * 64
    attention = 64 * (4 + 2 + 2 + 4) * 32
    roles = {role: row["parameters"] for role, row in facts["roles"].items()}
    assert roles == {
        "embed": 320 * 64,
        "head": 320 * 64,
        "attention": 3 * attention,
        "expert": 2 * 8 * expert,
        "mlp": dense,
        "router": 2 * 8 * 64,
        "norm": 3 * (2 * 64 + 2 * 32) + 64,
    }
    assert facts["parameters"]["total"] == sum(roles.values())
    idle = 320 * 64 + 2 * 6 * expert  # the look-up, and 6 of 8 experts in two layers
    assert facts["parameters"]["active"] == sum(roles.values()) - idle
    assert facts["kv_cache_bytes_per_token"] == 3 * 2 * 2 * 32
    assert facts["layers"]["kinds"] == [
        {"layers": 1, "holds": ["attention", "mlp"]},
        {"layers": 2, "holds": ["attention", "expert"]},
    ]
    quantized = 3 * attention + 16 * expert + dense
    matrices = 3 * 4 + 16 * 3 + 3
    kept = 2 * (sum(roles.values()) - quantized)
    assert facts["output"]["bytes"] == quantized * 9 // 16 + 8 * matrices + kept
    assert facts["stored"] == {"BF16": 2 * sum(roles.values())}
    assert facts["names"] == {"missing": {}, "extra": {}, "unknown": {}}


def test_a_config_alone_says_the_same_of_sizes(moe: Path) -> None:
    headers, alone = inspect(find(str(moe))), inspect(find(str(moe / "config.json")))
    assert "alone" in alone["origin"]
    for key in ("parameters", "roles", "layers", "output", "names", "verdict"):
        assert alone[key] == headers[key], key
    (moe / "model.safetensors").unlink()
    assert inspect(find(str(moe)))["roles"] == alone["roles"]


def test_names_that_the_table_does_not_expect(tmp_path: Path) -> None:
    shapes = shapes_of(QWEN3_MOE)
    del shapes["model.layers.1.self_attn.q_norm.weight"]
    shapes["model.layers.1.self_attn.sinks"] = (4,)
    shapes["model.layers.2.self_attn.q_proj.bias"] = (128,)
    facts = inspect(find(str(write_model(tmp_path / "odd", shapes, QWEN3_MOE))))
    assert facts["names"] == {
        "missing": {"model.layers.#.self_attn.q_norm.weight": 1},
        "extra": {"model.layers.#.self_attn.q_proj.bias": 1},
        "unknown": {"model.layers.#.self_attn.sinks": 1},
    }
    assert facts["verdict"] == "new architecture"
    assert "no role: model.layers.#.self_attn.sinks (1)" in display.inspection(facts)


def test_tied_embeddings_count_once_and_are_active(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "tie_word_embeddings": True}
    tied = inspect(find(str(write_model(tmp_path / "tied", shapes_of(config), config))))
    apart = inspect(find(str(write_model(tmp_path / "apart", shapes_of(QWEN3_MOE), QWEN3_MOE))))
    embedding = 320 * 64
    assert tied["parameters"]["total"] == apart["parameters"]["total"] - embedding
    assert tied["parameters"]["active"] == apart["parameters"]["active"]


def test_unknown_keys_are_those_that_nobody_knows() -> None:
    rules = families()["qwen3_moe"]
    assert unknown_keys(QWEN3_MOE, rules) == []
    config = {**QWEN3_MOE, "rope_theta": 1e6, "router_jitter": 0.1, "gating": {"depth": 2}}
    assert unknown_keys(config, rules) == ["router_jitter", "gating.depth"]


def test_an_unknown_key_is_a_config_delta(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "router_jitter": 0.1}
    facts = inspect(find(str(write_model(tmp_path / "m", shapes_of(QWEN3_MOE), config))))
    assert facts["verdict"] == "config delta"
    assert facts["unknown_config_keys"] == ["router_jitter"]


def test_a_quantized_source_counts_weights_not_storage(tmp_path: Path) -> None:
    """Block FP8: a byte a weight and a scale per block; scales are no tensors of their own."""
    shapes = shapes_of(QWEN3_MOE)
    quantized = {n: s for n, s in shapes.items() if "_proj" in n}
    folder = tmp_path / "fp8"
    folder.mkdir()
    table = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    config = {**QWEN3_MOE, "quantization_config": table}
    (folder / "config.json").write_text(json.dumps(config))
    rest = {n: s for n, s in shapes.items() if n not in quantized}
    scales = {f"{n}_scale_inv": (-(-s[0] // 32), -(-s[1] // 32)) for n, s in quantized.items()}
    files = {
        "a.safetensors": (quantized, "F8_E4M3"),
        "b.safetensors": (rest, "BF16"),
        "c.safetensors": (scales, "F32"),
    }
    for name, (held, dtype) in files.items():
        write_shard(folder / name, held, dtype)
    write_index(folder, {n: file for file, (held, _) in files.items() for n in held})
    facts, plain = inspect(find(str(folder))), inspect(find(str(_plain(tmp_path, shapes))))
    assert facts["parameters"] == plain["parameters"]
    assert facts["names"]["unknown"] == {}
    assert facts["source_format"] == "FP8 in blocks of 32x32"
    assert facts["output"]["bytes"] == plain["output"]["bytes"], "all of it becomes NVFP4"
    elements = sum(s[0] * s[1] for s in quantized.values())
    blocks = sum(s[0] * s[1] for s in scales.values())
    kept = plain["output"]["source_bytes"] - 2 * elements
    assert facts["output"]["source_bytes"] == elements + 4 * blocks + kept


def _plain(tmp_path: Path, shapes: Shapes) -> Path:
    return write_model(tmp_path / "plain", shapes, QWEN3_MOE)


@pytest.mark.parametrize(
    ("model", "expert_bits", "mlp_bits"),
    [
        ("zai-org--GLM-5.2", 16, 16),
        ("openai--gpt-oss-120b", 4.25, 16),
        ("moonshotai--Kimi-K3", 4.25, 16),
        ("deepseek-ai--DeepSeek-V4-Pro-0813", 4.25, 8 + 8 / 128**2),
    ],
)
def test_declared_formats(model: str, expert_bits: float, mlp_bits: float) -> None:
    stored = declared(json.loads((PUBLISHED / f"{model}.json").read_text()))
    name = "model.layers.9.mlp.experts.3.up_proj.weight"
    assert stored.stored_bits(Role.EXPERT, name, (64, 64)) == expert_bits
    mlp = "model.layers.9.mlp.up_proj.weight"
    assert stored.stored_bits(Role.MLP, mlp, (64, 64)) == mlp_bits
    assert stored.stored_bits(Role.NORM, "model.norm.weight", (64,)) == 16


# The shipped recipes' models, from their published configs. Figures: FACTS 3 and 7, the models'
# own cards.

PUBLISHED_FIGURES = [
    # recipe, total and active in billions, tolerance, KV bytes per token
    ("glm-5.2", 743.3, 40.2, 0.1, 78 * 656 + 21 * 132),
    ("llama-3.1-8b", 8.03, 7.50, 0.01, 32 * 2 * 8 * 128),
    ("gpt-oss-120b", 116.83, 5.13, 0.01, None),
    ("qwen3.5-397b", 397, 16.4, 1, 15 * 2 * 2 * 256),
    ("minimax-m3", 427, 24.7, 1, None),
    ("kimi-k3", 2780, 104, 2, 24 * 576),
    ("deepseek-v4", 1573, 49, 1, None),
]


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("recipe", "total", "active", "within", "cache"), PUBLISHED_FIGURES)
def test_the_recipes_models(
    unreachable: None, recipe: str, total: float, active: float, within: float, cache: int | None
) -> None:
    found = find(recipe)
    kind = found.config["model_type"]
    if kind not in by_model_type():
        pytest.skip(f"no architecture file for {kind} yet")
    facts = inspect(found)
    assert "the Hub cannot be reached; the published config.json that ships" in facts["origin"]
    assert facts["parameters"]["total"] / 1e9 == pytest.approx(total, abs=within)
    assert facts["parameters"]["active"] / 1e9 == pytest.approx(active, abs=within)
    assert facts["unknown_config_keys"] == []
    if cache is not None:
        assert facts["kv_cache_bytes_per_token"] == cache
    assert all(len(line) <= display.WIDTH for line in display.inspection(facts).splitlines())


def test_glm_5_2(unreachable: None) -> None:
    facts = inspect(find("glm-5.2"))
    if facts["family"] != "glm_moe_dsa":
        pytest.skip("no architecture file yet")
    assert facts["mtp"]["tensors"] == 791
    assert facts["output"]["mtp_bytes"] / 1e9 == pytest.approx(19.9, abs=0.05)
    assert facts["output"]["bytes"] / 1e9 == pytest.approx(444.7, abs=0.25)
    indexed = sum(k["layers"] for k in facts["layers"]["kinds"] if "indexer" in k["holds"])
    assert indexed == 78 - 57
    assert facts["quantized_by_default"]["roles"] == ["expert"]
    assert "sparse attention" in facts["engine"]["cpu"]


def test_every_hub_recipe_has_its_published_config() -> None:
    from onboard.lookup import published
    from onboard.recipe import names

    models = [resolve(name).source.model for name in names()]
    hub = [model for model in models if not model.startswith("package:")]
    assert hub
    assert all(published(model) for model in hub)


def test_the_packaged_gguf_without_conversion() -> None:
    facts = inspect(find("smollm2-135m"))
    assert facts["family"] == "llama"
    assert facts["parameters"]["total"] == 134_515_008
    assert facts["roles"]["mlp"]["nvfp4_parameters"] == 30 * 3 * 576 * 1536


# Unknown model types


def unknown(tmp_path: Path, config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    return inspect(find(str(write_model(tmp_path / "unknown", shapes, config))))


def test_only_the_model_type_differs(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "model_type": "brandnew_moe", "router_jitter": 0.1}
    facts = unknown(tmp_path, config, shapes_of(QWEN3_MOE))
    assert facts["verdict"] == "config delta"
    assert facts["nearest"]["family"] == "qwen3_moe"
    assert facts["nearest"]["regenerates"]
    assert facts["unknown_config_keys"] == ["router_jitter"]
    assert facts["next"] == (
        "add 'brandnew_moe' to model_types in onboard/architectures/qwen3_moe.py"
    )


def test_a_wrapper_with_another_prefix_is_no_new_architecture(tmp_path: Path) -> None:
    text = {**QWEN3_MOE, "model_type": "inner"}
    config = {"model_type": "outer", "text_config": text}
    shapes = {f"language_model.{name}": shape for name, shape in shapes_of(QWEN3_MOE).items()}
    facts = unknown(tmp_path, config, shapes)
    assert (facts["verdict"], facts["nearest"]["family"]) == ("config delta", "qwen3_moe")
    assert facts["regenerates"]


def test_renamed_modules_are_a_new_architecture_with_guessed_roles(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "model_type": "brandnew_moe"}
    shapes = {renamed(name): shape for name, shape in shapes_of(QWEN3_MOE).items()}
    facts = unknown(tmp_path, config, shapes)
    assert facts["verdict"] == "new architecture"
    roles = {guess["template"]: guess["role"] for guess in facts["guesses"]}
    expected = {
        "model.embed_tokens.weight": "embed",
        "lm_head.weight": "head",
        "model.layers.#.norm_in.weight": "norm",
        "model.layers.#.mixer.q_proj.weight": "attention",
        "model.layers.#.moe.router.weight": "router",
        "model.layers.#.moe.bank.#.w1.weight": "expert",
        "model.layers.#.moe.bank.#.w2.weight": "expert",
        "model.layers.#.mlp.w2.weight": "mlp",
    }
    assert {template: roles[template] for template in expected} == expected
    sure = {guess["template"]: guess["confidence"] for guess in facts["guesses"]}
    assert sure["lm_head.weight"] > 0.9
    assert all(0 <= confidence <= 1 for confidence in sure.values())
    assert "import Architecture" in facts["architecture"]


def families_and_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "qwen3_moe", QWEN3_MOE
    for path in sorted(PUBLISHED.glob("*.json")):
        config = json.loads(path.read_text())
        if config["model_type"] in by_model_type():
            yield path.stem, config


@pytest.mark.parametrize("rename", [False, True])
@pytest.mark.parametrize(
    "config", [pytest.param(config, id=name) for name, config in families_and_configs()]
)
def test_a_generated_file_regenerates_names_and_shapes(
    tmp_path: Path, config: dict[str, Any], rename: bool
) -> None:
    small = twins.shrink(config, 256)
    shapes = shapes_of(small)
    if rename:
        shapes = {renamed(name): shape for name, shape in shapes.items()}
    new = {**small, "model_type": "brand-new.moe"}
    new.pop("quantization_config", None)
    facts = unknown(tmp_path, new, shapes)
    assert facts["regenerates"]
    written = tmp_path / "brand_new_moe.py"
    written.write_text(facts["architecture"])
    rules = load(written)
    made = {tensor.name: tensor.shape for tensor in generate(rules, "brand-new.moe", new)}
    assert made == shapes
    guessed = {guess["template"]: guess["role"] for guess in facts["guesses"]}
    for name in shapes:
        assert rules.role(name).value == guessed[canonical(name)], name


def test_a_generated_file_holds_for_other_sizes(tmp_path: Path) -> None:
    """It is a table, not a list of what was read: another config of the family gives its names."""
    config = {**QWEN3_MOE, "model_type": "brandnew"}
    text = unknown(tmp_path, config, {renamed(n): s for n, s in shapes_of(QWEN3_MOE).items()})
    written = tmp_path / "brandnew.py"
    written.write_text(text["architecture"])
    sizes = {"num_hidden_layers": 5, "num_experts": 4, "hidden_size": 80, "mlp_only_layers": [1, 2]}
    larger = {**QWEN3_MOE, **sizes}
    expected = {renamed(name): shape for name, shape in shapes_of(larger).items()}
    assert {t.name: t.shape for t in generate(load(written), "brandnew", larger)} == expected


@pytest.mark.parametrize("seed", range(6))
def test_irregular_checkpoints_are_regenerated_too(tmp_path: Path, seed: int) -> None:
    """Random layers lose tensors, change widths, and hold other numbers of experts."""
    chance = random.Random(seed)
    shapes = {}
    for name, shape in shapes_of({**QWEN3_MOE, "num_hidden_layers": 6}).items():
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer and chance.random() < 0.15:
            continue
        if layer and chance.random() < 0.1:
            shape = (*shape[:-1], shape[-1] * 2 + 1)
        shapes[name] = shape
    config = {**QWEN3_MOE, "num_hidden_layers": 6, "model_type": "odd"}
    facts = unknown(tmp_path, config, shapes)
    assert facts["regenerates"]
    written = tmp_path / "odd.py"
    written.write_text(facts["architecture"])
    assert {t.name: t.shape for t in generate(load(written), "odd", config)} == shapes


def test_expressions_come_from_the_config(tmp_path: Path) -> None:
    config = {**QWEN3_MOE, "model_type": "brandnew"}
    text = unknown(tmp_path, config, shapes_of(QWEN3_MOE))["architecture"]
    lines = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    when = "if layer not in mlp_only_layers"
    experts = "model.layers.{layer}.mlp.experts.{expert}"
    assert (
        f"expert {experts}.{{gate_proj,up_proj}}.weight moe_intermediate_size, hidden_size {when}"
        in lines
    )
    assert f"router model.layers.{{layer}}.mlp.gate.weight num_experts, hidden_size {when}" in lines
    assert (
        "attention model.layers.{layer}.self_attn.o_proj.weight "
        "hidden_size, num_attention_heads * head_dim" in lines
    )


def test_a_config_alone_of_an_unknown_type(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN3_MOE, "model_type": "brandnew"}))
    facts = inspect(find(str(path)))
    assert facts["nearest"]["family"] == "qwen3_moe"
    assert facts["nearest"]["names"] is None
    assert "architecture" not in facts
    assert "likeness" in display.inspection(facts)


# Where a model is


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(InputError, match=r"config\.json: not valid JSON"):
        find(str(path))
    with pytest.raises(InputError, match=r"expected a missing\.json, found none"):
        find(str(tmp_path / "missing.json"))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A repository of two shards whose data are larger than their headers."""
    config = {**QWEN3_MOE, "hidden_size": 256}
    shapes = list(shapes_of(config).items())
    parts = {"a.safetensors": dict(shapes[::2]), "b.safetensors": dict(shapes[1::2])}
    files = {n: write_shard(tmp_path / n, held).read_bytes() for n, held in parts.items()}
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["config.json"] = json.dumps(config).encode()
    with hub_server.serve(files) as served:
        yield served


def onboard(tmp_path: Path, endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a Hub: huggingface_hub reads its environment once per process."""
    variables = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
        "ONBOARD_HOME": str(tmp_path / "home"),
    }
    return subprocess.run(
        [sys.executable, "-m", "onboard", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )


def test_a_hub_model_costs_its_headers_and_nothing_more(tmp_path: Path, hub: Hub) -> None:
    done = onboard(tmp_path, hub.url, "inspect", "acme/tiny", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout)
    assert facts["verdict"] == "supported"
    assert SHA[:12] in facts["origin"]
    asked = {"a.safetensors": [], "b.safetensors": []}  # type: ignore[var-annotated]
    for verb, path, span in hub.requests:
        name = path.partition("?")[0].rpartition("/")[2]
        if name in asked:
            assert verb == "GET"
            assert span is not None, f"{name} was asked for whole"
            asked[name].append(span)
    for name, spans in asked.items():
        length = int.from_bytes(hub.files[name][:8], "little")
        assert spans == ["bytes=0-7", f"bytes=8-{7 + length}"]
        assert len(hub.files[name]) > 2 * length, "the test's weights are the larger part"
    assert not (tmp_path / "home").exists()


def test_a_damaged_shard_on_the_hub_is_named(tmp_path: Path, hub: Hub) -> None:
    hub.files = {**hub.files, "b.safetensors": hub.files["b.safetensors"][:-2]}
    done = onboard(tmp_path, hub.url, "inspect", "acme/tiny")
    assert done.returncode == 2
    assert "acme/tiny/b.safetensors: truncated or damaged" in done.stderr


def test_without_a_hub_the_shipped_config_stands_in(tmp_path: Path) -> None:
    done = onboard(tmp_path, "http://127.0.0.1:9", "inspect", "llama-3.1-8b")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "the Hub cannot be reached" in said
    assert "meta-llama--Llama-3.1-8B-Instruct.json" in said
    done = onboard(tmp_path, "http://127.0.0.1:9", "inspect", "acme/other")
    assert done.returncode == 4
    assert "cannot reach the Hub" in done.stderr


# The command


def test_write_makes_the_file_once_and_only_for_unknown_types(tmp_path: Path, moe: Path) -> None:
    from typer.testing import CliRunner

    from onboard.cli import app

    config = {**QWEN3_MOE, "model_type": "brandnew"}
    folder = str(write_model(tmp_path / "new", shapes_of(QWEN3_MOE), config))
    target = tmp_path / "brandnew.py"
    assert CliRunner().invoke(app, ["inspect", folder, "--write", str(target)]).exit_code == 0
    assert load(target).model_types.keys() == {"brandnew"}
    again = CliRunner().invoke(app, ["inspect", folder, "--write", str(target)])
    assert again.exit_code == 2
    known = CliRunner().invoke(app, ["inspect", str(moe), "--write", str(tmp_path / "x.py")])
    assert known.exit_code == 2
    assert not (tmp_path / "x.py").exists()


def test_neither_command_imports_torch(moe: Path) -> None:
    code = (
        "import sys; from onboard.cli import main\n"
        "for command in ('inspect', 'plan'):\n"
        f"    sys.argv = ['onboard', command, {str(moe)!r}]\n"
        "    try: main()\n"
        "    except SystemExit as e: assert e.code in (0, None), e.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
