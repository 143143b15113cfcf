"""A group of one's own: the page's example as it stands, and what a recipe may be called."""

from __future__ import annotations

import importlib
import pickle
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import own_planners
import pytest
from golden_data import tokenizer
from own_planners import Asking, Nameless, plan_boxes, plan_nothing
from shard_factory import SPECIAL_TOKENS, VIT, picture, small_config, write_tar
from torch.utils.data import DataLoader

from bagel_wds import collate_wrapper
from bagel_wds.errors import ConfigError, NoUsableSampleError, PlannerError
from bagel_wds.groups import groups_of, planner_of, resolve, transforms_of
from bagel_wds.planners import PLANNERS, plan_t2i, register_planner
from bagel_wds.records import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bagel_wds.datasets import PackedDataset

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/own-group.md").read_text(encoding="utf-8")


def page_sample(number: int) -> dict[str, Any]:
    """A page with two boxes."""
    boxes = [{"x": number, "y": i, "word": f"{number}{'ab'[i]}"} for i in range(2)]
    return {"__key__": f"page-{number}", "json": {"boxes": boxes}, "png": picture(number)}


def config(recipe: str, shards: str = "nowhere.tar", **settings: Any) -> Any:
    group = {"recipe": recipe, "dataset_names": ["scans"], "vit_image_transform_args": VIT}
    return small_config(
        grouped_datasets={"pages": group}, dataset_info={"pages": {"scans": {"shards": shards}}}, **settings
    )


def build(recipe: str, shards: str, *, num_workers: int = 0, **settings: Any) -> PackedDataset:
    built: PackedDataset = config(recipe, shards, **settings).build(
        tokenizer(), SPECIAL_TOKENS, 0, 1, num_workers, global_seed=0
    )
    return built


@pytest.fixture
def own_names() -> Iterator[None]:
    """What is registered is forgotten at the end."""
    known = dict(PLANNERS)
    yield
    PLANNERS.clear()
    PLANNERS.update(known)


@pytest.fixture
def pages(tmp_path: Path) -> str:
    return write_tar(tmp_path / "pages.tar", [page_sample(number) for number in range(6)])


def test_the_pages_example_runs_as_it_stands_with_workers(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) < 30
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "block.py").write_text(block)
    for shard in range(2):
        samples = [
            {
                "__key__": f"street-{number}",
                "before.jpg": picture(number, "jpg"),
                "later.jpg": picture(number + 9, "jpg"),
                "txt": f"A car came, the {number}th.",
            }
            for number in range(4 * shard, 4 * shard + 4)
        ]
        write_tar(tmp_path / f"streets-{shard:06}.tar", samples)

    done = subprocess.run(
        [sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == 0, done.stderr
    told = re.fullmatch(r"(\d+) torch.Size\(\[(\d+), 588\]\) (\d+)\n", done.stdout)
    assert told is not None, done.stdout
    length, patches, answers = map(int, told.groups())
    # Pictures of 40 x 24 become 224 x 378 for the ViT: 16 x 27 patches, two pictures a sample and five samples or more.
    assert 4096 <= length < 36_864
    assert patches % (2 * 16 * 27) == 0
    assert patches // (2 * 16 * 27) >= 4
    # Each answer is a dozen labels or so.
    assert answers >= 8 * (patches // (2 * 16 * 27))


@pytest.mark.slow
def test_a_worker_plans_by_a_recipe_that_only_its_parent_has_registered(own_names: None, pages: str) -> None:
    register_planner("boxes", plan_boxes)
    alone = iter(build("boxes", pages))
    dataset = build("boxes", pages, num_workers=1)

    loader = DataLoader(
        dataset, batch_size=1, num_workers=1, collate_fn=collate_wrapper(), multiprocessing_context="spawn"
    )
    found = [batch for batch, _ in zip(loader, range(2), strict=False)]

    for batch in found:
        assert batch.to_dict()["packed_text_ids"].tolist() == next(alone)["packed_text_ids"].tolist()
    asked = str(tokenizer().decode(found[0].to_dict()["packed_text_ids"]))
    assert re.search(r"What stands at (\d), (0|1)\?.*\1(a|b)", asked), asked
    labels = str(tokenizer().decode(found[0].to_dict()["packed_label_ids"]))
    assert re.search(r"\d(a|b)", labels)
    assert "What" not in labels
    # A mixture file alone can name the same function.
    by_path = next(iter(build("own_planners:plan_boxes", pages)))
    assert by_path["packed_text_ids"].tolist() == found[0].to_dict()["packed_text_ids"].tolist()


def test_the_planner_is_found_where_the_run_is_configured_and_travels_with_it(own_names: None) -> None:
    register_planner("boxes", plan_boxes)
    settings = resolve(config("boxes"))
    sent = pickle.dumps(settings)
    # As in a worker, which has not registered it.
    del PLANNERS["boxes"]

    group = groups_of(pickle.loads(sent))["pages"]

    assert group.recipe == "boxes"
    assert getattr(planner_of(group), "plan") is plan_boxes  # noqa: B009 - any planner may be there
    assert list(transforms_of(group)) == [Kind.VIT_IMAGE]
    with pytest.raises(ConfigError, match="'boxes' is none of t2i, vlm, edit, interleaved;"):
        groups_of(config("boxes"))


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("interleavd", "recipe 'interleavd' is none of .* did you mean 'interleaved'?"),
        (
            "mine",
            "call register_planner before the dataset is built, or name a function as package.module:function",
        ),
        ("no_such_module:plan", "recipe 'no_such_module:plan' cannot be imported: ModuleNotFoundError"),
        ("own_planners:plan_pages", "cannot be imported: AttributeError"),
        ("own_planners:LIMIT", "'own_planners:LIMIT' is int, not a function"),
        ("own_planners:Asking", "'own_planners:Asking' is the class Asking; give a function"),
        (":plan", "recipe ':plan' cannot be imported"),
    ],
)
def test_a_recipe_that_names_nothing_is_refused_when_the_dataset_is_built(recipe: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"group 'pages': .*{says}"):
        build(recipe, "nowhere.tar")


def test_what_cannot_travel_to_a_worker_is_refused_where_it_is_named(
    own_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan_inside(sample: Any, tools: Any, draws: Any) -> Any: ...

    plans: tuple[Any, ...] = (plan_inside, lambda sample, tools, draws: None)
    for plan in plans:
        with pytest.raises(
            ConfigError, match=r"cannot be handed to DataLoader workers.*top level of a module"
        ):
            register_planner("mine", plan)
    monkeypatch.setattr(own_planners, "LIMIT", plan_inside)
    with pytest.raises(ConfigError, match="cannot be handed to DataLoader workers"):
        groups_of(config("own_planners:LIMIT"))

    register_planner("bound", partial(plan_boxes))
    assert groups_of(config("bound"))


def test_a_name_is_taken_once(own_names: None) -> None:
    with pytest.raises(
        ConfigError, match=r"register_planner\('t2i'\): the name is taken by .*plan_t2i; give another"
    ):
        register_planner("t2i", plan_boxes)
    with pytest.raises(ConfigError, match="a name has no colon"):
        register_planner("a:b", plan_boxes)
    register_planner("boxes", plan_boxes)
    register_planner("boxes", plan_boxes)
    with pytest.raises(ConfigError, match="taken by own_planners:plan_boxes"):
        register_planner("boxes", plan_t2i)


@pytest.mark.parametrize(
    ("name", "plan", "says"),
    [
        ("mine", 3, r"register_planner\('mine', ...\): the planner is int, not a function"),
        ("mine", None, "the planner is NoneType, not a function"),
        ("mine", Asking, "the planner is the class Asking; give a function"),
        (3, plan_boxes, "a name is a string, not int"),
        (None, plan_boxes, "a name is a string, not NoneType"),
    ],
)
def test_what_is_no_planner_or_no_name_is_refused_where_it_is_registered(
    own_names: None, name: Any, plan: Any, says: str
) -> None:
    known = dict(PLANNERS)

    with pytest.raises(ConfigError, match=says):
        register_planner(name, plan)

    assert known == PLANNERS


def test_a_planner_is_registered_again_if_it_is_the_same_and_no_other_takes_its_name(own_names: None) -> None:
    nameless = Nameless()
    boxes: Any = plan_boxes
    again: list[tuple[Any, Any, Any]] = [
        # Planner, the same once more, another.
        (partial(boxes, most=1), partial(boxes, most=1), partial(boxes, most=2)),
        (partial(plan_boxes), partial(plan_boxes), partial(plan_nothing)),
        (Asking(1), Asking(1), Asking(2)),
        (nameless, nameless, Nameless()),
        (plan_boxes, plan_boxes, partial(plan_boxes)),
    ]
    for number, (first, same, other) in enumerate(again):
        register_planner(f"mine-{number}", first)
        register_planner(f"mine-{number}", same)
        with pytest.raises(ConfigError, match=rf"'mine-{number}'.*the name is taken by .*own_planners"):
            register_planner(f"mine-{number}", other)
        assert PLANNERS[f"mine-{number}"] is same

    # A module that is loaded again has the same function anew.
    register_planner("boxes", plan_boxes)
    before = dict(vars(own_planners))
    try:
        reloaded = importlib.reload(own_planners)
        assert reloaded.plan_boxes is not plan_boxes
        register_planner("boxes", reloaded.plan_boxes)
        assert PLANNERS["boxes"] is reloaded.plan_boxes
    finally:
        vars(own_planners).update(before)


def test_a_script_that_ends_itself_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_itself.py").write_text("import sys\nsys.exit(4)\n")
    (tmp_path / "is_stopped.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match=r"'ends_itself:plan' cannot be imported: SystemExit\(4\)"):
        groups_of(config("ends_itself:plan"))
    # Ctrl-C is the user's.
    with pytest.raises(KeyboardInterrupt):
        groups_of(config("is_stopped:plan"))


@pytest.mark.parametrize("fidelity", ["corrected", "upstream"])
def test_a_plan_that_lies_ends_the_run_and_one_without_loss_is_dropped(pages: str, fidelity: str) -> None:
    with pytest.raises(
        PlannerError,
        match=r"'own_planners:plan_lies' gave a plan that cannot be for sample 'page-\d' of .*pages.tar: "
        r"segment 0 \(vae_image\) shows view 0, which is a vit_image",
    ):
        next(iter(build("own_planners:plan_lies", pages, fidelity=fidelity)))
    with pytest.raises(
        PlannerError, match=r"refused sample 'page-\d'.*whose reason is none of bagel_wds.Reason"
    ):
        next(iter(build("own_planners:plan_without_code", pages, fidelity=fidelity)))
    with pytest.raises(NoUsableSampleError, match=r"group 'pages': no usable sample.*no_loss 1000"):
        next(iter(build("own_planners:plan_silent", pages, fidelity=fidelity)))


def test_a_planner_that_fails_ends_the_run_and_names_the_sample(tmp_path: Path) -> None:
    samples = [page_sample(0), {**page_sample(1), "json": {"words": []}}]
    url = write_tar(tmp_path / "pages.tar", samples)

    with pytest.raises(PlannerError) as caught:
        next(iter(build("own_planners:plan_boxes", url)))

    assert "recipe 'own_planners:plan_boxes' failed on sample 'page-1' of" in str(caught.value)
    assert "pages.tar: KeyError('boxes')" in str(caught.value)
    with pytest.raises(PlannerError, match=r"gave NoneType for sample 'page-.', not a SamplePlan"):
        next(iter(build("own_planners:plan_nothing", url)))
    assert plan_nothing.__doc__


def test_samples_that_a_planner_refuses_are_counted_by_its_reason(tmp_path: Path) -> None:
    samples = [page_sample(0), {**page_sample(1), "json": {"boxes": []}}, {**page_sample(2), "png": b""}]
    del samples[2]["png"]
    dataset = build("own_planners:plan_boxes", write_tar(tmp_path / "pages.tar", samples))

    next(iter(dataset))

    dropped = dataset.stats()["groups"]["pages"]["dropped"]
    assert set(dropped) == {"row_invalid", "image_missing"}


def test_a_state_names_the_recipe_and_refuses_another(own_names: None, pages: str) -> None:
    register_planner("boxes", plan_boxes)
    first, other = build("boxes", pages), build("own_planners:plan_boxes", pages)
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state = first.state_dict()

    with pytest.raises(ConfigError, match="recipe"):
        other.load_state_dict(state)
    other.load_state_dict(state, allow=["recipes"])

    assert next(iter(other))["packed_text_ids"].tolist() == next(batches)["packed_text_ids"].tolist()


def test_a_text_member_is_a_field_where_there_is_no_json(tmp_path: Path) -> None:
    from bagel_wds.decode import decode_sample
    from bagel_wds.errors import BadSample

    assert decode_sample({"__key__": "k", "txt": "naïve".encode()}).fields == {"txt": "naïve"}
    assert decode_sample({"__key__": "k", "txt": "decoded before"}).fields == {"txt": "decoded before"}
    # JSON that is there says it all.
    assert decode_sample({"__key__": "k", "txt": b"a", "json": b'{"b": 1}'}).fields == {"b": 1}
    with pytest.raises(BadSample, match="the text of the sample is no UTF-8"):
        decode_sample({"__key__": "k", "txt": b"\xff"})
