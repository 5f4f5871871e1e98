"""`polymix.search` on tiny models of three kinds: a ViT, a BERT, a causal model."""

import copy
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import polymix
from polymix.convert.trained import TrainedPlan, fingerprint
from polymix.errors import CapabilityError, DataError, OptionError, ResultsError
from polymix.train.distill.batches import features_of, logits_of
from polymix.workflows.search import stages
from polymix.workflows.search.damage import Damage
from polymix.workflows.search.samples import parted
from tests.workflows.search.helpers import MS, bert, encoder, fixed_times, gpt2, images, louder, texts, vit, windows

HOSTS = {"vit": (vit, images, "logits"), "bert": (bert, texts, "features"), "gpt2": (gpt2, windows, "logits")}
QUICK = {"mixers": ("qt", "pom", "keep"), "steps": 24, "budget": 0.7}


@pytest.fixture(scope="module")
def found():
    """A model of each host and the result of one search for it, made when it is first asked for."""
    made = {}

    def of(name):
        if name not in made:
            make, data, _ = HOSTS[name]
            model = make()
            made[name] = model, polymix.search(model, data(), **QUICK)
        return made[name]

    return of


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTS)
def test_the_plan_keeps_the_budget_and_the_model_stays(found, name):
    make, _, kind = HOSTS[name]
    (model, answer), before = found(name), make().state_dict()
    assert answer.content["damage"] == kind
    assert answer.points[0]["share"] <= 0.7 + 1e-9 and set(answer.plan().values()) != {"keep"}
    assert type(model) is type(make()) and not any("mixer" in key for key in model.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(part.requires_grad for part in model.parameters())


@pytest.mark.parametrize("name", HOSTS)
def test_convert_starts_from_the_trained_mixers(found, name):
    """The true damage that is printed is that of the model which `polymix.convert` makes of the plan."""
    model, answer = found(name)
    data, kind = HOSTS[name][1](), HOSTS[name][2]
    report = polymix.convert(model, answer, copy=True)
    assert set(report.adapters) == set(answer.trained.parts) != set()
    for layer, state in answer.trained.parts.items():
        own = report.adapters[layer].state_dict()
        assert own.keys() == state.keys() and all(torch.equal(own[key], state[key]) for key in own)
    read = logits_of if kind == "logits" else features_of
    damage = Damage(model, parted(data, 0, QUICK["steps"]).comparing, kind, read, 0)
    assert damage(lambda: nullcontext(report.model)) == answer.points[0]["true"]
    with torch.no_grad():
        trained = (read(report.model, data[0]) - read(model, data[0])).square().mean()
        plain = polymix.convert(model, answer.plan(), copy=True, input=data[0]).model
        untrained = (read(plain, data[0]) - read(model, data[0])).square().mean()
    assert trained < untrained


def test_training_lowers_the_damage_of_what_is_trained(found):
    for name in HOSTS:
        rows = found(name)[1].content["damages"]
        untrained = {(row["layer"], row["mixer"]): row["damage"] for row in rows if row["stage"] == "untrained"}
        trained = {(row["layer"], row["mixer"]): row["damage"] for row in rows if row["stage"] == "trained"}
        assert trained and sum(trained.values()) < sum(untrained[pair] for pair in trained)


@pytest.mark.slow
def test_plans_are_compared_on_samples_that_nothing_was_learnt_or_chosen_by(monkeypatch):
    data = images()
    samples = parted(data, 0, 8)
    ids = [{id(part) for part in place} for place in samples]
    assert all(ids) and not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])
    loader = DataLoader(torch.arange(100.0), 8, shuffle=True)
    samples = parted(loader, 0, 8)
    values = [set(torch.cat([*part]).tolist()) for part in samples]
    assert not (values[0] & values[1] or values[0] & values[2] or values[1] & values[2])
    assert len(values[1]) == len(values[2]) == 25 and len(samples.train) == 8
    seen = []
    own = stages.Damage

    def noted(model, batches, *rest):
        seen.append(batches)
        return own(model, batches, *rest)

    monkeypatch.setattr(stages, "Damage", noted)
    polymix.search(vit(), data, **QUICK)
    assert len(seen) == 2 and not {id(part) for part in seen[0]} & {id(part) for part in seen[1]}


def test_predicted_and_true_damage_of_points_and_rules_are_there(found):
    _, answer = found("vit")
    assert 2 <= len(answer.points) <= 3 and all(row["true"] >= 0 for row in (*answer.points, *answer.rules))
    assert {row["name"].split(",")[0].strip("0123456789 ") for row in answer.rules} == {
        "last",
        "first",
        "evenly spaced",
    }
    shares = [row["share"] for row in answer.front]
    assert shares == sorted(shares) and answer.front[-1]["predicted"] == 0.0
    text = str(answer)
    assert "Predicted against true" in text and "best fixed rule" in text


def test_what_is_far_from_the_front_is_not_trained(found):
    _, answer = found("vit")
    stages = [row["stage"] for row in answer.content["damages"]]
    assert 0 < stages.count("trained") <= stages.count("untrained")


def test_a_mixer_that_is_poor_untrained_is_trained_in_its_best_layers():
    """On MiniLM qt was left untrained: before training it harms more than PADRe, and after it less."""
    run = object.__new__(stages.Run)
    pairs = {(layer, mixer): None for layer in "abcd" for mixer in ("qt", "pom")}
    run.request = SimpleNamespace(mixers=("qt", "pom"), keeps=True, budget=0.7, limit=70_000, say=lambda line: None)
    run.candidates = SimpleNamespace(layers=dict.fromkeys("abcd"), labels=lambda layer: ["qt", "pom"], adapters=pairs)
    run.ms = dict.fromkeys(pairs, 4.0) | {(layer, "keep"): 10.0 for layer in "abcd"}
    run.whole = 40.0
    qt = {("a", "qt"): 2.0, ("b", "qt"): 2.5, ("c", "qt"): 3.0, ("d", "qt"): 90.0}
    near = run._near(qt | {(layer, "pom"): 0.1 for layer in "abcd"})
    assert set(near) == {("a", "qt"), ("b", "qt"), ("c", "qt"), *((layer, "pom") for layer in "abcd")}


def test_training_is_undone_only_where_it_harms_on_the_same_samples():
    """Untrained mixers are scored on a quarter of the samples, on which they may look better than on all."""
    run = object.__new__(stages.Run)
    scores = {
        "trained": {"better": 1.0, "seems worse": 3.0, "worse": 3.0},
        "restored": {"seems worse": 4.0, "worse": 2.0},
    }
    adapters = {name: torch.nn.Linear(1, 1) for name in scores["trained"]}
    run.candidates = SimpleNamespace(adapters=adapters, state=lambda name: copy.deepcopy(adapters[name].state_dict()))
    run.request = SimpleNamespace(mixers=())
    run.results = SimpleNamespace(content={"diverged": []})
    before = {name: adapter.weight.item() for name, adapter in adapters.items()}

    def score(stage, pairs):
        for name in pairs if stage == "trained" else ():
            adapters[name].weight.data += 1  # as training would have
        return {name: scores[stage][name] for name in pairs}

    run._score = score
    assert run._train(list(adapters), dict.fromkeys(adapters, 2.5)) == {"better": 1.0, "seems worse": 3.0, "worse": 2.0}
    moved = {name: adapter.weight.item() != before[name] for name, adapter in adapters.items()}
    assert moved == {"better": True, "seems worse": True, "worse": False}


@pytest.mark.slow
def test_mixers_are_scaled_to_the_data_and_not_to_the_input_that_is_timed(found):
    """On MiniLM, timed at random tokens, qt began ten times as far off."""
    _, answer = found("vit")
    again = polymix.search(vit(), images(), input=100 * torch.ones(1, 3, 16, 16), **QUICK)
    assert again.content["damages"] == answer.content["damages"]


def test_without_keep_every_layer_is_replaced():
    answer = polymix.search(vit(), images(), mixers=("qt", "pom"), steps=4)
    assert len(answer.plan()) == 4 and "keep" not in answer.plan().values()
    assert not answer.rules and "fixed rule" not in answer.headline and "rule" not in str(answer)


@pytest.mark.slow
def test_answers_that_do_not_fit_into_memory_give_the_same(found):
    _, answer = found("gpt2")
    again = polymix.search(gpt2(), windows(), memory=0, **QUICK)
    assert again.content["damages"] == answer.content["damages"] and again.points == answer.points


def test_a_search_over_the_degree_of_padre():
    answer = polymix.search(vit(), images(), budget=0.8, mixers=("padre:degree=2", "padre:degree=3", "keep"), steps=4)
    assert {getattr(mixer, "degree", None) for mixer in answer.plan().values()} <= {2, 3, None}


# What is refused


def test_a_mixer_that_the_host_cannot_have_is_left_out_by_name():
    """poly_nl sees all tokens: a causal model cannot have it. The others are searched."""
    said = []
    answer = polymix.search(gpt2(), windows(), mixers=("poly_nl", "qt", "keep"), steps=2, say=said.append)
    assert any(line.startswith("poly_nl is left out: ") for line in said)
    assert any(note.startswith("poly_nl is left out: ") for note in answer.content["notes"])
    assert not any(row["mixer"] == "poly_nl" for row in answer.content["damages"])


@pytest.mark.parametrize("mixers", [("poly_nl", "keep"), ("poly_nl",)])
def test_layers_that_no_candidate_fits_are_an_error(mixers):
    with pytest.raises(CapabilityError, match="poly_nl is left out"):
        polymix.search(gpt2(), windows(), mixers=mixers, steps=2)


def test_a_budget_that_cannot_be_met_says_the_least_that_can():
    with pytest.raises(OptionError, match=r"budget.*at least 0\.4,.*got 0\.3, which no plan"):
        polymix.search(vit(), images(), budget=0.3, mixers=("qt", "keep"), steps=2)


def test_mixers_that_are_all_slower_than_attention_are_told_so(monkeypatch):
    """No budget helps then: one above 1 is refused."""
    monkeypatch.setitem(MS, "qt", 20.0)
    with pytest.raises(OptionError, match=r"mixers.*faster ones, or .keep., got qt, with which .* take 2 times"):
        polymix.search(vit(), images(), mixers=("qt",), steps=2)
    with pytest.raises(OptionError, match=r"budget.*at least 1,.*Pass faster mixers, or a longer input"):
        polymix.search(vit(), images(), mixers=("qt", "keep"), steps=2)


@pytest.mark.parametrize(("data", "words"), [
    (lambda: images(3, 16), "48 samples"), (lambda: images(2, 40), "at least 4 batches"),
    (lambda: [torch.randint(9, (16, 12))] * 8, "fails"), (list, "length 0"),
])  # fmt: skip
def test_data_that_cannot_be_used_are_refused(data, words):
    with pytest.raises((DataError, ValueError), match=words) as error:
        polymix.search(vit(), data(), **QUICK)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("options", "name"), [
    ({"budget": 0}, "budget"), ({"budget": 1.5}, "budget"), ({"mixers": ()}, "mixers"), ({"mixers": "qt"}, "mixers"),
    ({"mixers": ("qt", "qt")}, "mixers"), ({"mixers": ("softmax", "keep")}, "mixers"), ({"steps": 0}, "steps"),
    ({"loss": "words"}, "loss"), ({"resume": True}, "resume"), ({"memory": -1}, "memory"), ({"seed": -1}, "seed"),
    ({"learning_rate": 0}, "learning_rate"), ({"seconds": 0}, "seconds"), ({"model": "vit"}, "model"),
])  # fmt: skip
def test_wrong_options_are_refused_before_any_compute(options, name):
    arguments = {"model": encoder(), "data": [], **options}
    with pytest.raises(OptionError) as error:
        polymix.search(**arguments)
    assert error.value.argument == name


@pytest.mark.slow
def test_random_weights_are_a_loud_warning():
    """Their output hardly depends on the input, so that no damage says anything."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "num_heads": 2, "depth": 4, "num_classes": 5}
    answer = polymix.search(timm.create_model("vit_tiny_patch16_224", **sizes), images(), **QUICK)
    assert any("carries nothing" in note for note in answer.content["notes"])
    assert not any("carries nothing" in note for note in polymix.search(vit(), images(), **QUICK).content["notes"])


# The plan as a file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("found") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "layer_times", fixed_times)
        answer = polymix.search(vit(), images(), out=out, **QUICK)
    return out, answer


@pytest.mark.slow
@pytest.mark.draws
def test_the_folder_holds_the_plan_and_no_checkpoints(folder):
    out, answer = folder
    names = {path.name for path in out.iterdir()}
    assert names == {"results.json", "plan.json", "parts.safetensors", "report.html", "front.png"}
    report = polymix.convert(vit(), out / "plan.json")
    again = polymix.convert(vit(), answer)
    assert all(
        torch.equal(a, b)
        for a, b in zip(report.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    )
    page = (out / "report.html").read_text()
    assert "Predicted against true" in page and "<svg" in page


def test_trained_mixers_are_refused_for_another_model(folder):
    out, _ = folder
    other = louder(vit())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(OptionError, match="trained for another model"):
        polymix.convert(other, str(out / "plan.json"))
    assert before.keys() == other.state_dict().keys()


def test_trained_mixers_are_refused_for_another_conversion():
    """`match` makes pom wider than the mixer that was trained; the model stays as it was."""
    model, name = vit(), "blocks.0.attn"
    report = polymix.convert(model, {name: "pom"}, copy=True)
    plan = TrainedPlan({name: polymix.PomConfig()}, fingerprint(model), {name: report.adapters[name].state_dict()})
    with pytest.raises(OptionError, match="options of the search"):
        polymix.convert(model, plan, match="parameters")
    assert not any("mixer" in key for key in model.state_dict())


@pytest.mark.parametrize("harm", ["cut", "other", "gone", "words"])
def test_damaged_plans_are_refused(folder, tmp_path, harm):
    out, _ = folder
    for name in ("plan.json", "parts.safetensors"):
        (tmp_path / name).write_bytes((out / name).read_bytes())
    parts, plan = tmp_path / "parts.safetensors", tmp_path / "plan.json"
    if harm == "cut":
        parts.write_bytes(parts.read_bytes()[:-8])
    elif harm == "gone":
        parts.unlink()
    elif harm == "other":
        plan.write_text(json.dumps({**json.loads(plan.read_text()), "plan": 7}))
    else:
        plan.write_text("qt")
    with pytest.raises(ResultsError):
        polymix.convert(vit(), plan)
    with pytest.raises(OptionError, match="does not exist"):
        polymix.convert(vit(), tmp_path / "none.json")
