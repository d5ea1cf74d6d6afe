"""What every engine test is measured against: transformers' own greedy `generate`, on the CPU in float32.

Equality of tokens says something only where the reference is sure of each token and does not repeat itself, so a
`Reference` carries its smallest margin, and `assert_decisive` comes before any comparison.
"""

import atexit
import gc
import importlib.util
import json
import random
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType

import torch

ASSETS = Path(__file__).parent.parent / "assets"

# Between the best two logits. Float32 on another order of summation moves logits by about 1e-5.
MIN_GAP = 1e-3


@dataclass(frozen=True)
class Reference:
    """A greedy completion and the smallest gap between the two best logits over all of its steps."""

    token_ids: list[int]
    smallest_gap: float


def random_prompt(length: int, vocab_size: int = 512, seed: int = 0) -> list[int]:
    """The same ids for the same arguments; prompts of different length or seed share no prefix."""
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(vocab_size) for _ in range(length)]


@lru_cache
def training_script() -> ModuleType:
    """The script behind the bundled model, which knows what the model was, and was not, trained on."""
    spec = importlib.util.spec_from_file_location("train_tiny_qwen3", ASSETS / "train_tiny_qwen3.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def story_prompt(length: int) -> list[int]:
    """So many ids out of the middle of the bundled model's kind of stories; another length is another text."""
    from transformers import AutoTokenizer

    script, rng = training_script(), random.Random(length)
    stories = " ".join(script.make_story(rng, rng.choice(script.HEROES)) for _ in range(12))
    ids = AutoTokenizer.from_pretrained(ASSETS / "tiny-qwen3")(stories)["input_ids"]
    start = 0 if length == 1 else rng.randrange(20, 60)
    return ids[start : start + length]


def reference_generate(path: str, prompt: list[int], max_tokens: int, eos: tuple[int, ...] = ()) -> Reference:
    """What transformers generates greedily; computed once a session. With `eos`, any of these ids ends it."""
    return _generate(path, tuple(prompt), max_tokens, eos)


def decisive_tokens(path: str, prompt: list[int], max_tokens: int) -> list[int]:
    """The reference completion, shown to be clear and varied enough to compare with."""
    reference = reference_generate(path, prompt, max_tokens)
    assert_decisive(reference)
    return reference.token_ids


def assert_decisive(reference: Reference, min_distinct: int | None = None) -> None:
    """The reference is sure of every token, and at least `min_distinct` of them differ (10, and a quarter of all)."""
    if min_distinct is None:
        min_distinct = max(10, len(reference.token_ids) // 4)
    distinct = len(set(reference.token_ids))
    assert distinct >= min_distinct, f"only {distinct} distinct ids in {reference.token_ids}: choose another seed"
    assert reference.smallest_gap > MIN_GAP, f"gap {reference.smallest_gap:.1e} leaves a tie: choose another seed"


@cache
def _generate(path: str, prompt: tuple[int, ...], max_tokens: int, eos: tuple[int, ...]) -> Reference:
    ids = torch.tensor([prompt])
    output = load_reference_model(path).generate(
        ids,
        # Without it, transformers masks every id of the prompt that happens to be the padding id.
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        eos_token_id=list(eos) or None,
        do_sample=False,
        temperature=None,
        top_k=None,
        top_p=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    return Reference(output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item())


@lru_cache(maxsize=4)
def load_reference_model(path: str) -> torch.nn.Module:
    """transformers' model in float32, with the RoPE base that config.json names."""
    model = _import_qwen3().from_pretrained(path).float().eval()
    # No EOS of the checkpoint ends a completion, only those that a test asks for.
    model.generation_config.eos_token_id = None
    raw = json.loads((Path(path) / "config.json").read_text())
    theta = (raw.get("rope_parameters") or raw)["rope_theta"]
    inv_freq = model.model.rotary_emb.inv_freq
    expected = theta ** -(torch.arange(len(inv_freq)) / len(inv_freq))
    torch.testing.assert_close(inv_freq, expected, rtol=1e-5, atol=0)  # transformers 4.51 may miss a 5.x spelling
    return model


@lru_cache
def _import_qwen3() -> type[torch.nn.Module]:
    from transformers import Qwen3ForCausalLM

    # That made a million objects, which every engine that exits would search for garbage; spare them until the end.
    gc.freeze()
    atexit.register(gc.unfreeze)
    return Qwen3ForCausalLM
