"""The words of a report and its HTML, without a browser."""

from __future__ import annotations

import json
import re

import pytest
from made_up_runs import HOSTILE, header, plan, read, run, window

from cannikin.report.charts import run_charts
from cannikin.report.numbers import Target, reached
from cannikin.report.page import Figure, Missing, make_page
from cannikin.report.write import compare_headline, comparison, headline, run_section
from cannikin.runlog import EventRecord


def page_of(*runs, target=None):
    found = [read(records, f"run {place}") for place, records in enumerate(runs)]
    if len(found) == 1:
        return make_page("one", [run_section(found[0], "one")], "")
    return make_page(
        "many", [comparison(found, target, "many"), *(run_section(each, each.name, folded=True) for each in found)], ""
    )


def figures_in(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page, re.DOTALL)[1])


# Words


def test_the_headline_says_what_ran_how_it_went_and_how_it_ended():
    said = " ".join(headline(read(run())))
    for part in (
        "Made up (1,000 parameters) trained on 3 ranks: 3 x made up",
        "120 steps",
        "split 24, 16, 8",
        "The one plan for a split that had never run predicted its step time 3.3% off.",
        "its own first windows, which had 3 x 16",
        "The run ended as it should, at step 120.",
    ):
        assert part in said


def test_the_headline_of_a_run_that_ended_early_says_why():
    early = EventRecord(step=120, kind="end", text="in the middle of epoch 2", data={"early": True})
    said = headline(read([*run(ends=False), early]))
    assert said[-1] == "The run ended early, at step 120: in the middle of epoch 2."


def two_new_splits(first_step: int = 0):
    return [
        header(first_step=first_step),
        window(first_step, (16, 16, 16), step_ms=50.0),
        plan(first_step + 10, (24, 16, 8), predicted_step_ms=36.0),
        window(first_step + 14, (24, 16, 8), step_ms=30.0),
        plan(first_step + 24, (23, 16, 9), predicted_step_ms=30.0),
        window(first_step + 28, (23, 16, 9), step_ms=30.3),
        plan(first_step + 38, (23, 16, 9), predicted_step_ms=30.3, first_step=first_step + 28),
    ]


def test_predictions_are_told_by_both_measures():
    said = " ".join(headline(read(two_new_splits())))
    assert "Half of the 2 plans for splits that had never run predicted their step time to within 10%" in said
    assert "the worst was 20% off." in said
    assert "The last plan predicts 30.3 ms; the best of 3 splits of this total batch that ran took 30 ms" in said
    assert "took 30 ms: 1.0% off." in said


def test_what_was_promised_of_splits_that_had_never_run_is_marked_where_they_begin():
    drawn = next(f for group in run_charts(read(two_new_splits())).values() for f in group if f.name == "predicted")
    (marks,) = [trace for trace in drawn.views[0].traces if trace["name"] == "promised"]
    assert (marks["x"], marks["y"]) == ([14.0, 28.0], [36.0, 30.0])


def test_a_log_that_begins_in_mid_run_is_said_not_to_know_which_splits_had_run():
    records = two_new_splits(first_step=400)
    said = " ".join(headline(read(records)))
    assert "The log begins at step 400: which splits had run before is not known" in said
    assert "splits that had never run" not in said
    assert "not known: the log begins later" in page_of(records)


def test_a_policy_that_predicts_nothing_has_no_sentence_on_predictions():
    found = read([header(), plan(0, (16, 16, 16), predicted_step_ms=None), window(4, (16, 16, 16))])
    assert "predict" not in " ".join(headline(found))


def test_the_bottleneck_is_named_where_others_wait_for_it():
    assert "Rank 0 (made up) is the bottleneck" in " ".join(headline(read([header(), window(0, (24, 16, 8))])))
    assert "in balance" in " ".join(headline(read([header(), window(0, (16, 16, 16))])))


def test_communication_is_named_where_it_takes_longer_than_computing():
    slow_link = window(0, done_ms=(90.0, 90.0, 90.0), wait_ms=(0.0, 0.0, 0.0))
    assert "Communication is the bottleneck" in " ".join(headline(read([header(), slow_link])))


@pytest.mark.parametrize("records", [[header()], [header(1), window(0, (16,))], run(ends=False)[:-1]])
def test_a_run_that_did_not_say_that_it_ended_is_running_or_was_killed(records):
    found = read(records)
    assert headline(found)[-1] == f"The run is still running or was killed: the log ends at step {found.last_step}."


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (0.75, "; DDP would use 46%."),
        (0.0, "; DDP's even split does not fit."),
        (None, "can do."),
    ],
)
def test_the_use_of_the_hardware_is_a_sentence_with_what_is_known_of_ddp(speed, words):
    found = read([header(), plan(0, even_speed=speed), window(0)])
    (sentence,) = [each for each in headline(found) if each.startswith("It uses 62% of what the hardware can do")]
    assert sentence.endswith(words)


# Figures


@pytest.mark.parametrize(("speed", "lines"), [(0.75, 2), (0.0, 1), (None, 1)])
def test_the_use_of_ddp_is_a_line_only_where_it_is_known(speed, lines):
    found = read([header(), plan(0, even_speed=speed), window(0), window(10)])
    drawn = next(f for group in run_charts(found).values() for f in group if f.name == "use")
    assert len(drawn.views[0].traces) == len(drawn.legend) == lines


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 9, 64, 200])
def test_every_figure_has_data_words_and_units_for_any_number_of_ranks(num_ranks):
    found = read(run(num_ranks=num_ranks))
    figures = [each for group in run_charts(found).values() for each in group]
    for figure in figures:
        assert isinstance(figure, Figure), figure
        assert figure.title
        assert figure.caption.endswith(".")
        for side in ("xaxis", "yaxis"):
            assert re.search(r"\(.+\)$", figure.layout[side]["title"]["text"]), figure.name
        for view in figure.views:
            assert view.traces
            assert all(len(trace["x"]) for trace in view.traces)
        assert figure.height <= 2000


def test_a_log_with_a_header_alone_says_so_instead_of_drawing():
    found = read([header()])
    figures = [each for group in run_charts(found).values() for each in group]
    assert all(isinstance(figure, Missing) and figure.reason.endswith(".") for figure in figures)
    assert figures_in(page_of([header()])) == {}


def test_a_log_of_many_windows_keeps_its_peak_and_draws_few_points():
    records = [header(), *(window(10 * place, step_ms=9e4 if place == 4321 else 30.0) for place in range(9000))]
    drawn = next(f for group in run_charts(read(records)).values() for f in group if f.name == "predicted")
    measured = drawn.views[0].traces[0]["y"]
    assert max(measured) == 9e4
    assert len(measured) < 2000


def test_the_goodput_of_every_plan_is_a_view_with_the_chosen_total_marked():
    drawn = next(f for group in run_charts(read(run())).values() for f in group if f.name == "goodput")
    assert len(drawn.views) == 12
    curve, chosen = drawn.views[0].traces
    assert curve["x"] == [24, 48, 96]  # what the ranks cannot hold has no goodput
    assert (chosen["x"], chosen["y"]) == ([48], [910])


def test_plans_that_compared_nothing_get_a_sentence():
    silent = plan(10, candidate_totals=(), candidate_goodputs=())
    drawn = next(
        f for group in run_charts(read([header(), window(0), silent])).values() for f in group if f.name == "goodput"
    )
    assert "do not say what was compared" in drawn.reason


def test_a_run_resumed_on_other_numbers_of_ranks_is_drawn_throughout():
    records = [
        header(3),
        window(0),
        window(10),
        header(2, first_step=10),
        window(10, (30, 18)),
        header(5, first_step=20),
    ]
    page = page_of(records)
    assert "It was resumed 2 times." in page
    assert "1 window was done again" in page
    assert len(figures_in(page)["s0-split"]["views"][0]["traces"]) == 3


def test_a_log_without_times_of_day_is_drawn_over_steps_and_says_what_it_cannot_draw():
    timeless = [header(), window(0, elapsed_ms=None), EventRecord(step=5, kind="eval", data={"score": 1.0})]
    page = page_of(timeless)
    assert "s0-split" in figures_in(page)
    assert "does not say when it was evaluated" in page
    assert "do not say when they evaluated" in page_of(timeless, timeless, target=Target(metric="score", value=0.5))


# Several runs


def evaluated(*values):
    events = [
        EventRecord(step=10 * place, kind="eval", data={"score": value}, elapsed_ms=1000.0 * (place + 1))
        for place, value in enumerate(values)
    ]
    return [header(), *events]


@pytest.mark.parametrize(("sign", "target"), [(1, 0.8), (-1, -0.8)])
def test_the_first_to_reach_the_target_is_named_whichever_way_is_better(sign, target):
    runs = [
        read(evaluated(*(sign * v for v in row)), name)
        for name, row in (("slow", (0.1, 0.2, 0.9)), ("fast", (0.2, 0.8)))
    ]
    result = reached(runs, Target(metric="score", value=target))
    assert result.times_ms == (3000.0, 2000.0)
    assert "fast reached score" in compare_headline(runs, result)[1]
    assert "1.50 times as long" in compare_headline(runs, result)[1]


def test_a_run_that_never_got_there_is_said_not_to_have():
    runs = [read(evaluated(0.1, 0.9), "a"), read(evaluated(0.1, 0.2), "b"), read([header()], "c")]
    result = reached(runs, Target(metric="score", value=0.8))
    assert result.times_ms == (2000.0, None, None)
    assert compare_headline(runs, result)[-1] == "b, c did not reach it."


# HTML


def test_names_from_logs_cannot_end_a_script_or_open_an_element():
    page = page_of(run(text=HOSTILE), run(num_ranks=9, text=HOSTILE), target=Target(metric=HOSTILE, value=0.8))
    assert page.count("<script") == page.count("</script>") == 3
    assert "<img" not in page
    assert figures_in(page)


def test_plotly_draws_names_as_they_are():
    figures = figures_in(page_of(run(text="<b>bold</b>"), run(text="<b>bold</b>")))
    titles = [figure["layout"]["yaxis"]["title"]["text"] for figure in figures.values()]
    assert "&lt;b&gt;bold&lt;/b&gt; (as logged)" in titles
    assert not any("<b>" in title for title in titles)
