"""Answers that are free until a marker, on models that say anything."""

import re

import pytest
from tiny_models import BOS, EOS, FIRST_BYTE, GREEDY, answer, asking, loaded, opened, smollm2, tiny_model

from trioserve.engine.base import Constraint, ConstraintKind, FinishReason
from trioserve.engine.sampling import Sampling


def after(trigger, grammar):
    return Constraint(ConstraintKind.LARK, grammar, trigger)


@pytest.fixture(scope="module")
def tiny():
    with loaded(tiny_model()) as weights:
        yield weights


def said(weights, constraint, seed, **fields):
    often = ((FIRST_BYTE + ord("b"), 6.0), (EOS, 8.0))
    sampling = Sampling(temperature=2.0, top_k=0, min_p=0.0, seed=seed, logit_bias=often)
    with opened(weights, n_ctx=512) as session:
        return answer(session, asking([BOS, 5], 200, sampling, constraint=constraint, **fields))


@pytest.mark.parametrize("seed", range(3))
def test_after_each_marker_the_grammar_holds_and_before_it_nothing(tiny, seed):
    got = said(tiny, after("b", 'start: "XY" | "Z!" | "o"'), seed, ignore_eos=True)
    assert got.reason is FinishReason.LENGTH
    assert EOS not in got.tokens
    assert len(re.findall("b", got.text)) > 3
    # Where a token says more than the marker, that is what follows.
    assert not re.search("b(?!XY|Z!|[aeiou])..", got.text)
    assert re.search("b(XY|Z!)", got.text)
    assert re.search("[^bXYZ!aeiou]", got.text)


def test_a_marker_may_come_in_pieces_and_a_token_may_go_on_after_it(tiny):
    held = 0
    for seed in range(6):
        # The second letter of a token like " ba" is already the grammar's.
        text = said(tiny, after("b", 'start: "a" /[0-9]{2}/ "!"'), seed, ignore_eos=True).text
        assert not re.search("ba(?![0-9]{2}!)...", text)
        held += len(re.findall("ba[0-9]{2}!", text))
    assert held
    free = [said(tiny, None, seed, ignore_eos=True).text for seed in range(3)]
    pairs = re.findall("[c-z]{2}", "".join(free))
    pair = max(pairs, key=pairs.count)
    texts = [said(tiny, after(pair, 'start: "-" /[0-9]{3}/'), seed, ignore_eos=True).text for seed in range(6)]
    assert any(re.search(f"{pair}-[0-9]{{3}}", text) for text in texts)


def test_the_answer_is_the_same_where_the_marker_does_not_come(tiny):
    assert said(tiny, after("nothing says this", 'start: "a"'), 1).text == said(tiny, None, 1).text


def test_a_model_ends_its_answer_only_where_it_is_free(tiny):
    ends = [said(tiny, after("b", 'start: /[^!b]{9}/ "!"'), seed) for seed in range(8)]
    assert all(got.reason is FinishReason.STOP for got in ends)
    assert all(re.fullmatch("([^b]|b[^!b]{9}!)*", got.text, re.DOTALL) for got in ends)
    assert any("!" in got.text for got in ends)


def test_a_form_for_a_token_that_is_no_text():
    with loaded(smollm2()) as weights:
        (end,) = weights.tokenize("<file_sep>", special=True, add_bos=False)
        constraint = after("", 'start: "a" mark_end\nmark_end: "<file_sep>"\n')
        for bias, by_token in ((100.0, True), (-100.0, False)):
            sampling = Sampling(temperature=0, logit_bias=((end, bias),))
            with opened(weights) as session:
                got = answer(session, asking([1, 5], 20, sampling, constraint=constraint))
            assert (got.tokens[1:] == [end]) is by_token
            assert got.reason is FinishReason.STOP
            assert by_token or got.text == "a<file_sep>"


def test_a_model_that_would_write_a_broken_call_writes_a_whole_one():
    begun, ended = "<|im_start|>user\nAsk.<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"
    prompt = (begun + '<call>\n{"name": "clock", "zone": 5, }\n</call>' + ended) * 3 + begun
    schema = '{"type": "object", "properties": {"name": {"const": "weather"}}, "required": ["name"]}'
    constraint = after("<call>", f'start: SPACE call SPACE "</call>"\nSPACE: /[ \\n]{{0,2}}/\ncall: %json {schema}\n')
    with loaded(smollm2()) as weights, opened(weights, n_ctx=512) as session:
        tokens = weights.tokenize(prompt, special=True, add_bos=False)
        free, held = (answer(session, asking(tokens, 60, GREEDY, constraint=form)).text for form in (None, constraint))
    assert '"clock"' in free
    assert re.match(r'<call>\s*{\s*"name"\s*:\s*"weather"', held)
