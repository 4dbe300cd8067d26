"""attn_implementation="rapt" in every model type of the installed transformers: a tiny model with random weights answers as
with transformers' own attention, or rapt refuses it by name. `./dev test torch` runs it with each version.

A wrong answer and any other exception fail, of every version. transformers_families.txt has the verdicts of some versions; with
one of them another verdict fails as well. RAPT_WRITE_FAMILIES=1 writes those that were found."""

import copy
import os
import re

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
import rapt.torch
import tiny_models
import torch
import transformers
import transformers_table
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NEW_TOKENS = 4
BEAMS = 2
WAYS = (*((sizes, "eager") for sizes in tiny_models.SIZES), (tiny_models.SIZES[0], "sdpa"))
TOLERANCE = 2e-4  # of the largest
IS_4 = transformers.__version__.startswith("4.")
SINKS_LEFT_OUT = ("granite_swa", "granitemoe_swa")  # of the weights that their eager attention returns, not of its result

transformers.logging.set_verbosity(transformers.logging.CRITICAL)


class Difference(Exception):
    pass


class NotBuilt(Exception):
    """Why, and whether another size may do."""

    def __init__(self, why, of_size=False):
        super().__init__(why)
        self.of_size = of_size


@pytest.fixture(scope="module")
def calls():
    """The calls of rapt's attention function."""
    rapt.torch.register_transformers()
    attend, made = ALL_ATTENTION_FUNCTIONS["rapt"], []

    def counted(*arguments, **named):
        made.append(1)
        return attend(*arguments, **named)

    transformers.AttentionInterface.register("rapt", counted)
    yield made
    rapt.torch.register_transformers()


def build(kind, model_type, sizes, implementation, weights=None):
    config = tiny_models.tiny_config(model_type, sizes)
    config._attn_implementation = implementation
    torch.manual_seed(7)
    model = kind(config).eval()
    if weights is None:
        return tiny_models.randomise(model)
    model.load_state_dict(weights)
    return model


def main_output(output):
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), torch.Tensor):
            return getattr(output, name)
    parts = output.values() if hasattr(output, "values") else output
    return next(x for x in parts if isinstance(x, torch.Tensor) and x.is_floating_point())


def visible(x, given):
    """What padding does not decide; models without decoder that do not answer by token may pool at a position of padding."""
    mask = given.get("attention_mask")
    if mask is None or "decoder_input_ids" in given:
        return x
    return x[mask.bool()] if x.shape[:2] == mask.shape else x[:0]


def compare(what, got, want, tolerance=TOLERANCE):
    if got.shape != want.shape:
        raise Difference(f"{what}: {list(got.shape)} for {list(want.shape)}")
    if want.numel() == 0:
        return
    largest = want.double().abs().nan_to_num(0).max().clamp(min=1e-3)
    error = ((got.double() - want.double()).abs().nan_to_num(0).max() / largest).item()
    if error > tolerance or not torch.equal(got.isfinite(), want.isfinite()):
        raise Difference(f"{what}: {error:.1e}")


def run(model, arguments, **more):
    torch.manual_seed(5)
    return model(**arguments, **more)


def arguments_of(model):
    if type(model).forward is torch.nn.Module.forward:
        raise NotBuilt("no forward() of its own")
    errors = []
    for arguments in tiny_models.candidates(model):
        try:
            with torch.no_grad():
                answer = main_output(run(model, arguments))
            if not answer.isfinite().any():
                raise ValueError("an answer that is not finite")
            return arguments
        except Exception as error:
            errors.append((f"{', '.join(arguments)}: {error}", isinstance(error, (RuntimeError, IndexError))))
    if not any("Attention" in type(module).__name__ for module in model.modules()):
        raise NotBuilt("has no attention")
    of_size = [why for why, of_size in errors if of_size]
    why = next(iter(of_size + [why for why, _ in errors]), ", ".join(tiny_models.needed(model)))
    raise NotBuilt(f"inputs that the test does not make: {why}", bool(of_size))


def is_small(kind, model_type, sizes):
    """Whatever the speed of the processor, the same models are compared."""
    with torch.device("meta"):
        parameters = kind(tiny_models.tiny_config(model_type, sizes)).parameters()
    return sum(p.numel() for p in parameters) <= tiny_models.MOST_PARAMETERS


def why_not(error):
    missing = re.search(r"requires the (\w+) library|No module named '(\w+)'", str(error))
    if isinstance(error, ImportError) and missing:
        return NotBuilt(f"needs {missing[1] or missing[2]}")
    if "couldn't connect" in str(error):
        return NotBuilt("needs a download")
    of_size = not isinstance(error, (ImportError, AttributeError, KeyError))
    return NotBuilt(f"a configuration that the test does not make: {error}", of_size)


def reference(model_type):
    """A model with transformers' own attention, the sizes of it, and arguments for it."""
    reasons = []
    for kind in tiny_models.model_classes(model_type):
        for sizes, implementation in WAYS:
            try:
                if sizes != tiny_models.SIZES[0] and not is_small(kind, model_type, sizes):
                    continue
                model = build(kind, model_type, sizes, implementation)
                return model, sizes, arguments_of(model)
            except Exception as error:
                reasons.append(error if isinstance(error, NotBuilt) else why_not(error))
                if not reasons[-1].of_size:
                    break
    raise reasons[0] if reasons else NotBuilt("no model of its own, a part of others")


def padded(arguments):
    """The arguments without a mask, padded on the right and on the left. Padding has the least id: models pool at the
    greatest."""
    yield "no mask", arguments
    if "input_ids" in arguments:
        right = torch.ones_like(arguments["input_ids"])
        right[1, 6:] = 0
        for name, mask in (("right padding", right), ("left padding", right.flip(1))):
            ids = torch.where(mask == 1, arguments["input_ids"], 1)
            yield name, arguments | {"input_ids": ids, "attention_mask": mask}


def check_forward(models, arguments):
    for name, given in padded(arguments):
        try:
            with torch.no_grad():
                want = main_output(run(models["eager"], given))
        except Exception:  # the model takes no such mask
            continue
        with torch.no_grad():
            got = main_output(run(models["rapt"], given))
        compare(name, visible(got, given), visible(want, given))


def check_attentions(models, arguments):
    results = {}
    for implementation, model in models.items():
        try:
            with torch.no_grad():
                results[implementation] = run(model, arguments, output_attentions=True)
        except TypeError:  # the model has no such argument
            return
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        got, want = (getattr(results[n], name, None) for n in ("rapt", "eager"))
        want = [x for x in want or () if isinstance(x, torch.Tensor)]
        got = [x for x in got or () if isinstance(x, torch.Tensor)]
        if not want or (IS_4 and [x.shape for x in got] != [x.shape for x in want]):
            continue  # some models of 4 do not tell their attention that they want weights, or collect others with eager
        if len(got) != len(want):
            raise Difference(f"{name}: {len(got)} for {len(want)}")
        for ours, theirs in zip(got, want):
            if models["eager"].config.model_type in SINKS_LEFT_OUT:
                ours = ours / ours.sum(3, keepdim=True)
            compare(name, ours, theirs)


def check_gradients(models, arguments):
    gradients = {}
    for implementation, model in models.items():
        model.zero_grad()
        try:
            y = main_output(run(model, arguments))
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
        except Exception:
            if implementation == "eager":  # the model has none
                return
            raise
        gradients[implementation] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if gradients["rapt"].keys() != gradients["eager"].keys():
        raise Difference(f"gradients of {sorted(gradients['rapt'].keys() ^ gradients['eager'].keys())[:3]}")
    largest = max((g.abs().max().item() for g in gradients["eager"].values() if g.numel()), default=0)
    for name, want in gradients["eager"].items():
        if want.numel() == 0:
            continue
        error = (gradients["rapt"][name] - want).abs().max().item()
        if error > 1e-3 * want.abs().max().item() + 1e-4 * largest:
            raise Difference(f"gradient of {name}: {error:.1e}")


def check_generation(models, arguments):
    if "input_ids" not in arguments or not models["eager"].can_generate():
        return
    mask = torch.ones_like(arguments["input_ids"])
    mask[1, :3] = 0
    wanted = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    wanted |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask, "use_cache": True}
    arguments = {name: x for name, x in arguments.items() if name != "decoder_input_ids"}
    for name, way in (
        ("dynamic cache", {"cache_implementation": "dynamic"}),
        ("static cache", {"cache_implementation": "static"}),
        ("beams", {"num_beams": BEAMS}),
    ):
        try:
            want = models["eager"].generate(**arguments, **wanted, **way)
        except Exception:  # the model has no such cache
            continue
        torch.manual_seed(5)
        got = models["rapt"].generate(**arguments, **wanted, **way)
        if not getattr(want, "logits", None):
            continue
        for step, (ours, theirs) in enumerate(zip(got.logits, want.logits)):
            compare(f"{name}, step {step}", ours, theirs)


def checked_twice(check, models, arguments):
    """A difference of rounding, which some models make large, is not there in float64."""
    try:
        check(models, arguments)
    except Difference:
        doubles = {name: x.double() if x.is_floating_point() else x for name, x in arguments.items()}
        check({implementation: copy.deepcopy(model).double() for implementation, model in models.items()}, doubles)


def by_default(eager, model_type, sizes):
    """The model with the attention that transformers chooses, mostly PyTorch's. It differs from eager where a query sees no
    key, and where a model gives its own mask of bool, which eager adds to the scores."""
    return build(type(eager), model_type, sizes, None, eager.state_dict())


def one_line(error):
    return " ".join(str(error).split())


def verdict_of(model_type, calls):
    try:
        eager, sizes, arguments = reference(model_type)
    except NotBuilt as error:
        return f"not built: {one_line(error)[:120]}"
    calls.clear()
    try:
        models = {"eager": eager, "rapt": build(type(eager), model_type, sizes, "rapt", eager.state_dict())}
        try:
            check_forward(models, arguments)
        except Difference:
            models["eager"] = by_default(eager, model_type, sizes)
            checked_twice(check_forward, models, arguments)
        for check in (check_attentions, check_generation, check_gradients):
            checked_twice(check, models, arguments)
    except NotImplementedError as error:
        own = "attn_implementation='rapt': "
        text = one_line(error)
        return f"refused: {text.removeprefix(own)}" if text.startswith(own) else f"raises: {text[:200]}"
    except Difference as error:
        return f"wrong: {error}"
    except Exception as error:
        return f"raises: {type(error).__name__}: {one_line(error)[:200]}"
    return "equal" if calls else "equal: own attention"


# ---- Model types --------------------------------------------------------------------------------

MODEL_TYPES = list(tiny_models.model_types())
KNOWN = transformers_table.read().get(transformers.__version__)
WRITES = bool(os.environ.get("RAPT_WRITE_FAMILIES"))


@pytest.fixture(scope="module")
def verdicts():
    found = {}
    yield found
    if WRITES:
        transformers_table.merge(transformers.__version__, MODEL_TYPES, found)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_model_type(model_type, calls, verdicts):
    known = (KNOWN or {}).get(model_type)
    if known and known.startswith("not built") and not WRITES:
        pytest.skip(known)
    found = verdicts[model_type] = verdict_of(model_type, calls)
    assert not found.startswith(("wrong", "raises"))
    assert WRITES or KNOWN is None or found == known


@pytest.mark.skipif(WRITES, reason="writes the table")
def test_the_page_has_the_table():
    assert KNOWN is None or KNOWN.keys() == set(MODEL_TYPES)
    assert transformers_table.split_page()[1] == transformers_table.markdown()


@pytest.mark.skipif(IS_4, reason="rapt-server needs 5")
@pytest.mark.parametrize("model_type", ["bloom", "xglm", "trocr"])
def test_a_server_does_not_get_the_keys_of_attention_of_its_own(model_type, calls):
    kind = tiny_models.model_classes(model_type)[0]
    with pytest.raises(NotImplementedError, match="'rapt-server': .* has attention of its own, .* calls no attention function"):
        build(kind, model_type, tiny_models.SIZES[0], "rapt-server")


# ---- The sweep finds faults -----------------------------------------------------------------------


def attend_without(name):
    """An adapter that swallows an argument."""

    def faulty(module, query, key, value, attention_mask, **arguments):
        arguments.pop(name, None)
        return rapt.torch._transformers._attend(module, query, key, value, attention_mask, **arguments)

    return faulty


def attend_to_the_other_beam(module, query, key, value, attention_mask, **arguments):
    if key.shape[0] == 2 * BEAMS and query.shape[2] == 1:
        key, value = (x.unflatten(0, (2, BEAMS)).flip(1).flatten(0, 1) for x in (key, value))
    return rapt.torch._transformers._attend(module, query, key, value, attention_mask, **arguments)


def guess_causality(module, query, key, value, attention_mask, **arguments):
    """sdpa's rule: causal unless the layer says otherwise."""
    is_causal = getattr(module, "is_causal", True)
    return rapt.torch._transformers._attend(module, query, key, value, None, **arguments | {"is_causal": is_causal})


def mask_with(change):
    def faulty(**arguments):
        mask = rapt.torch._transformers._make_mask(**arguments)
        change(mask)
        return mask

    return faulty


def widen(mask):
    mask.rule = mask.rule._replace(right=1) if mask.rule.right == 0 and mask.shape[2] > 1 else mask.rule


def narrow(mask):
    if mask.rule.left is not None:
        mask.rule = mask.rule._replace(left=mask.rule.left - 1)


def shift(mask):
    mask.lengths = mask.lengths - 1


def forget_padding(mask):
    mask.padding = None


FAULTS = {
    "sinks swallowed": ("gpt_oss", attend_without("s_aux"), None),
    "indices swallowed": ("deepseek_v32", attend_without("indices"), None),
    "position bias swallowed": ("t5", attend_without("position_bias"), None),
    "softcap swallowed": ("gemma2", attend_without("softcap"), None),
    "causality guessed": ("splinter", guess_causality, None),
    "a key too late": ("llama", None, mask_with(widen)),
    "a window too narrow": ("mistral", None, mask_with(narrow)),
    "a query too early": ("llama", None, mask_with(shift)),
    "padding forgotten": ("llama", None, mask_with(forget_padding)),
    "the cache of another beam": ("llama", attend_to_the_other_beam, None),
}
NOT_IN_4 = {"indices swallowed": "has no DeepSeek 3.2", "position bias swallowed": "computes T5's attention by itself"}


@pytest.mark.parametrize("name", FAULTS)
def test_the_sweep_finds_a_fault(name, calls):
    if IS_4 and name in NOT_IN_4:
        pytest.skip(f"transformers 4 {NOT_IN_4[name]}")
    model_type, attend, make_mask = FAULTS[name]
    attend_now, mask_now = ALL_ATTENTION_FUNCTIONS["rapt"], ALL_MASK_ATTENTION_FUNCTIONS["rapt"]
    try:
        transformers.AttentionInterface.register("rapt", attend or attend_now)
        transformers.AttentionMaskInterface.register("rapt", make_mask or mask_now)
        assert verdict_of(model_type, calls).startswith("wrong")
    finally:
        transformers.AttentionInterface.register("rapt", attend_now)
        transformers.AttentionMaskInterface.register("rapt", mask_now)
