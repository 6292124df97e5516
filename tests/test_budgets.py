"""A time budget: what it chooses, and that the record is that of the same flags by hand."""

import pytest
import toys

import advdet
from advdet import budgets
from advdet.types import InputError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), (45, 45), (2.5, 2.5), ("90s", 90), ("20m", 1200), ("1.5h", 5400), (" .5m ", 30)],
)
def test_times_are_read(text, seconds):
    assert budgets.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "20 minutes", "-5m", "0s", 0, -1, "nan", "1e3", "m"])
def test_other_words_are_no_times(text):
    with pytest.raises(InputError, match="such as 90s, 20m or 1.5h"):
        budgets.seconds_of(text)


# An image costs a hundredth of a second a step; 300 steps are usual: 3 s an image.
@pytest.mark.parametrize(
    ("seconds", "given", "num_images", "steps"),
    [
        (300, {}, 100, None),  # as usual
        (345, {}, 110, None),  # two digits
        (150, {}, 50, None),
        (100, {}, 50, 200),  # fewer steps rather than fewer images
        (20, {}, 40, 50),  # then fewer images
        (3000, {}, 1000, None),
        (5000, {}, 1000, 500),  # more steps rather than more images
        (10_000, {}, 1000, 1000),
        (25_000, {}, 2500, 1000),  # then more images
        (1e6, {}, 5000, 1000),  # all there are
        (300, {"available": 30}, 30, 1000),
        (300, {"num_images": 20}, None, 1000),
        (30, {"num_images": 20}, None, 150),
        (30, {"num_images": 10}, None, None),
        (300, {"steps_stay": True}, 100, None),
        (60, {"steps_stay": True}, 20, None),
    ],
)
def test_images_and_steps_are_chosen_to_fit(seconds, given, num_images, steps):
    given = {"steps": 300, "available": 5000} | given
    found = budgets.choose(3.0, 0.01, seconds, **given)
    assert (found.num_images, found.steps) == (num_images, steps)
    images = num_images or given["num_images"]
    assert found.seconds == pytest.approx(images * (steps or 300) / 100)
    assert found.seconds <= seconds


@pytest.mark.parametrize("given", [{}, {"num_images": 30}, {"steps_stay": True}])
def test_a_time_that_buys_too_little_is_refused(given):
    with pytest.raises(InputError, match="leaves 5 s for attacks.* may take .*give more time"):
        budgets.choose(3.0, 0.01, 5, steps=300, available=5000, **given)


def test_a_command_is_repeated_without_its_budget():
    choice = budgets.Choice(100, 200, 1.0)
    for word in ("--time_budget=20m", "--time_budget 20m", "-time_budget=20m"):
        command = f"python -m experiments.x {word} --defense='a b'"
        assert budgets.repeated(command, choice) == (
            "python -m experiments.x '--defense=a b' --num_images=100 --steps=200"
        )


def test_the_record_is_that_of_the_same_flags_by_hand(monkeypatch, tmp_path, capsys):
    net = toys.network()
    given = dict(classifier=net, data=toys.splits(net), attack="ddn", preset="smoke", lanes=3)
    measured = []

    def rate(attack, objective, view, case, lanes):
        measured.append((lanes, type(view.detector).__name__))
        return 100.0, 0.0

    monkeypatch.setattr(budgets, "rate", rate)
    # So much time, at a hundred steps a second, that a slow machine changes nothing.
    bought = advdet.evaluate(
        toys.Ink(), time_budget="10h", command="python -m x --time_budget=10h", **given
    )
    assert measured == [(3, "NoDetector"), (3, "Ink")]
    record = bought.records["ddn"]
    run = record["run"]
    assert run["settings"]["num_images"] == 100 and run["settings"]["attack"]["steps"] == 1000
    assert run["command"] == "python -m x --num_images=100 --steps=1000"
    said = capsys.readouterr().err
    # 100 images x 1,000 steps at 100 a second, once without the detector and once with it.
    assert "time budget: 100 images with 1,000 steps, at most 33.3 min" in said
    assert run["command"] in said
    by_hand = advdet.evaluate(toys.Ink(), num_images=100, steps=1000, progress=False, **given)
    assert by_hand.records["ddn"]["run"] == {**run, "command": None}
    for part in ("attack", "indicators", "verdict"):
        assert by_hand.records["ddn"][part] == record[part]


def test_a_budget_with_nothing_to_choose_or_to_resume_is_refused():
    given = dict(classifier=toys.network(), data=toys.splits(toys.network()), time_budget="1m")
    for more, said in (
        (dict(num_images=8, steps=8), "nothing to choose"), (dict(resume=True), "chooses anew")
    ):  # fmt: skip
        with pytest.raises(InputError, match=said):
            advdet.evaluate("none", **given, **more)
