import pytest

from rollstream.chat.parsers.base import Segment
from rollstream.chat.parsers.json_call import UnreadableError
from rollstream.chat.parsers.turn import TurnReader


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("hello<|im_end|>", "hello"),
        ("hello <|im_end|>\n<|endoftext|><|endoftext|>\n", "hello "),
        ("hello<|END_OF_TURN_TOKEN|>", "hello"),
        ("hello<end_of_utterance>", "hello"),
        ("hello<turn|>\n", "hello"),
        ("<p><s>hello</s>", "<p><s>hello</s>"),
        ("hello<eos>", "hello<eos>"),
        ("<|im_end|> hello", "<|im_end|> hello"),
        ("hello \n", "hello \n"),
        ("<|eot_id|>", ""),
        ("", ""),
    ],
)
def test_end_tokens_are_markup_at_the_end_only(text: str, content: str) -> None:
    parsed = TurnReader(text).finish()
    assert parsed.content == content
    assert "".join(segment.text for segment in parsed.segments) == text


def test_neighbours_of_one_kind_are_one_segment() -> None:
    turn = TurnReader("abcd")
    turn.take("content", 1)
    turn.take("content", 1)
    turn.take("content", 2)
    turn.take("markup", 3)
    assert turn.finish().segments == (
        Segment("content", "ab"),
        Segment("markup", "c"),
        Segment("content", "d"),
    )


@pytest.mark.parametrize(
    ("text", "in_thinking", "reasoning", "content"),
    [
        ("\n<think>a</think>b", False, "a", "b"),
        ("<think>a</think>b<think>c</think>", False, "a\nc", "b"),
        ("<think>a</think>\n<think>c</think>b", False, "a\nc", "b"),
        ("before<think>a</think>", False, "a", "before"),
        ("before<think>a", False, "a", "before"),
        ("a</think>b<think>c</think>d", True, "a\nc", "bd"),
        ("\n a</think>b", True, "\n a", "b"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("<think>a</think>b", True, "a", "b"),
        ("<think>a", False, "a", ""),
        ("\n</think>\n\nb", False, "", "\n\nb"),
        ("<think></think>b", False, "", "b"),
    ],
)
def test_thinking(text: str, in_thinking: bool, reasoning: str, content: str) -> None:
    turn = TurnReader(text)
    turn.read_thinking(in_thinking)
    parsed = turn.finish()
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_content_up_to_a_marker_outside_of_thinking() -> None:
    turn = TurnReader("a<think>#</think>b#c<think>#")
    assert turn.take_content("#") and turn.position == 18
    turn.take("markup", 19)
    assert not turn.take_content("#") and turn.position == turn.end
    parsed = turn.finish()
    assert (parsed.content, parsed.reasoning) == ("abc", "#\n#")


@pytest.mark.parametrize(
    ("text", "end"),
    [("call <think> </x> #", 17), ("call <think> # </x>", 5), ("call # <think>", 5), ("call <think>", 5)],
)
def test_a_broken_call_ends_where_it_is_closed_or_thinking_begins(text: str, end: int) -> None:
    turn = TurnReader(text)
    assert turn.end_of_broken(0, min(turn.find("</x>"), turn.find("#")), "</x>") == end


def test_find_goes_forward_and_back() -> None:
    turn = TurnReader("a#b#c")
    assert [turn.find("#", start) for start in (2, 0, 1, 2, 4, 3)] == [3, 1, 1, 3, 5, 3]
    assert turn.find("?") == 5


def test_a_marker_inside_a_string_does_not_end_a_value() -> None:
    turn = TurnReader('{"a": "<x> </x>"}</x>')
    assert turn.decode_between(0, turn.find("</x>"), ("</x>",)) == ({"a": "<x> </x>"}, 17)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}}</x>', "Extra data: line 1 column 9"),
        ('{"a": "1</x>', "Unterminated string starting at: line 1 column 7"),
        ('{"a": "1</x> and "}, more</x>', "a string in it is not closed before '</x> and"),
    ],
)
def test_a_value_that_does_not_fill_its_place(text: str, message: str) -> None:
    turn = TurnReader(text)
    with pytest.raises(UnreadableError) as caught:
        turn.decode_between(0, turn.find("</x>"), ("</x>",))
    assert message in str(caught.value)
