"""attn_implementation="rapt" in every family of the installed transformers: a tiny model with random weights answers as with
transformers' own attention, or rapt refuses it by name. `./dev test torch` runs it.

A wrong answer and any other exception fail, of every version. transformers_families.txt has the verdicts of one version; with
that version a verdict that is another fails as well. RAPT_WRITE_FAMILIES=1 writes the file."""

import contextlib
import importlib.util
import os
import pathlib
import signal

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
import rapt.torch
import tiny_models
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

HERE = pathlib.Path(__file__).parent
NEW_TOKENS = 4
TOLERANCE = 2e-4  # of the largest
SLOW = 20  # seconds
SINKS_LEFT_OUT = ("granite_swa", "granitemoe_swa")  # of the weights that their eager attention returns, not of its result

transformers.logging.set_verbosity(transformers.logging.CRITICAL)


class Difference(Exception):
    pass


class TooSlow(BaseException):
    """Not an Exception, so that no model catches it."""


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


def build(kind, model_type, implementation, weights=None):
    config = tiny_models.tiny_config(model_type)
    config._attn_implementation = implementation
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
    errors = []
    for arguments in tiny_models.candidates(model):
        try:
            with torch.no_grad():
                main_output(run(model, arguments))
            return arguments
        except Exception as error:
            errors.append(f"{', '.join(arguments)}: {error}")
    raise ValueError("; ".join(errors) or "takes none of the usual arguments")


def reference(model_type):
    """A model with transformers' own attention, and arguments for it."""
    errors = []
    for kind in tiny_models.model_classes(model_type):
        for implementation in ("eager", "sdpa"):
            try:
                model = build(kind, model_type, implementation)
                return model, arguments_of(model)
            except Exception as error:
                errors.append(str(error))
    raise ValueError(errors[0] if errors else "has no model of its own")


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
        if not got and not importlib.util.find_spec("transformers.utils.output_capturing"):
            continue  # of transformers 4: some models do not tell their attention that they want weights
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
    for cache in ("dynamic", "static"):
        try:
            want = models["eager"].generate(**arguments, **wanted, cache_implementation=cache)
        except Exception:  # the model has no such cache
            continue
        torch.manual_seed(5)
        got = models["rapt"].generate(**arguments, **wanted, cache_implementation=cache)
        if not want.logits:
            continue
        for step, (ours, theirs) in enumerate(zip(got.logits, want.logits)):
            compare(f"{cache} cache, step {step}", ours, theirs)


@contextlib.contextmanager
def processor_seconds(limit):
    def give_up(*_):
        raise TooSlow

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def verdict_of(model_type, calls):
    try:
        with processor_seconds(SLOW):
            return compared(model_type, calls)
    except TooSlow:
        return "not built", f"takes more than {SLOW} seconds of a processor"


def compared(model_type, calls):
    try:
        eager, arguments = reference(model_type)
    except Exception as error:
        return "not built", " ".join(str(error).split())[:120]
    calls.clear()
    try:
        models = {"eager": eager, "rapt": build(type(eager), model_type, "rapt", eager.state_dict())}
        for check in (check_forward, check_attentions, check_gradients, check_generation):
            check(models, arguments)
    except NotImplementedError as error:
        text = " ".join(str(error).split())
        own = "attn_implementation='rapt': "
        return ("refused", text.removeprefix(own)) if text.startswith(own) else ("raises", text[:200])
    except Difference as error:
        return "wrong", str(error)
    except Exception as error:
        return "raises", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ("equal", "") if calls else ("equal", "own attention")


# ---- Families -----------------------------------------------------------------------------------

TABLE = HERE / "transformers_families.txt"
FAMILIES = tiny_models.families()


def table():
    """The version, and model type -> (verdict, reason)."""
    first, *lines = TABLE.read_text().splitlines()
    rows = (line.split("\t") for line in lines)
    return first.split()[-1], {model_type: (verdict, reason) for model_type, verdict, reason in rows}


@pytest.fixture(scope="module")
def verdicts():
    found = {}
    yield found
    if os.environ.get("RAPT_WRITE_FAMILIES"):
        lines = ["\t".join((name, *verdict)) for name, verdict in sorted(found.items())]
        TABLE.write_text("\n".join([f"Model types of transformers {transformers.__version__}", *lines]) + "\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, calls, verdicts):
    for model_type in FAMILIES[family]:
        found = verdicts[model_type] = verdict_of(model_type, calls)
        assert found[0] not in ("wrong", "raises"), f"{model_type} {found[0]}: {found[1]}"
        if os.environ.get("RAPT_WRITE_FAMILIES"):
            continue
        version, known = table()
        if version == transformers.__version__ and known.get(model_type, ("not built",))[0] != "not built":
            assert found == known[model_type], f"{model_type} is {found}; {TABLE.name} has {known[model_type]}"


# ---- The sweep finds faults -----------------------------------------------------------------------


def attend_without(name):
    """An adapter that swallows an argument."""

    def faulty(module, query, key, value, attention_mask, **arguments):
        arguments.pop(name, None)
        return rapt.torch._transformers._attend(module, query, key, value, attention_mask, **arguments)

    return faulty


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
    "padding forgotten": ("bert", None, mask_with(forget_padding)),
}


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="its families have other attention in 4")
@pytest.mark.parametrize("name", FAULTS)
def test_the_sweep_finds_a_fault(name, calls):
    model_type, attend, make_mask = FAULTS[name]
    attend_now, mask_now = ALL_ATTENTION_FUNCTIONS["rapt"], ALL_MASK_ATTENTION_FUNCTIONS["rapt"]
    try:
        transformers.AttentionInterface.register("rapt", attend or attend_now)
        transformers.AttentionMaskInterface.register("rapt", make_mask or mask_now)
        assert verdict_of(model_type, calls)[0] == "wrong"
    finally:
        transformers.AttentionInterface.register("rapt", attend_now)
        transformers.AttentionMaskInterface.register("rapt", mask_now)
