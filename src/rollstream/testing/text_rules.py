"""Rules that answer in text: a test of an agent loop says what the model says, and sees what it was shown."""

import inspect
from collections.abc import Awaitable, Callable

from rollstream.chat.tokenizer import ChatTokenizer
from rollstream.testing.scripted import AnswerRule, ScriptedRequest

TextRule = Callable[[str], str | Awaitable[str]] | Callable[[str, ScriptedRequest], str | Awaitable[str]]
"""From the prompt's text, special tokens included, to the answer's text; one with a second parameter gets
the request as well."""


def answer_by_text(tokenizer: ChatTokenizer, rule: TextRule, *, end: str = "<|im_end|>") -> AnswerRule:
    """A rule for `ScriptedEngine` and `StubServer` from a function of texts.

    Example:
        >>> rule = answer_by_text(tokenizer, lambda prompt: "5" if "2 + 3" in prompt else "I do not know")
        >>> engine = ScriptedEngine(rule)

    The answer's ids are those of its text and `end`. As with any rule that gives ids, the engine makes the
    log-probs up, always the same for a prompt and seed, and an answer that fills or passes `max_tokens` is
    cut there and ends with `length`, as SGLang says it.

    Args:
        tokenizer: of the model that is played.
        rule: what is answered, plain or async; what it raises is raised by `generate`.
        end: the token that ends the model's turn, put after every answer; "" puts nothing.

    Raises:
        ValueError: `end` is no token of the vocabulary.
    """
    if end and tokenizer.token_id(end) is None:
        raise ValueError(f"the vocabulary has no token {end!r}: give the model's end of turn as `end`")
    wants_request = _positional(rule) > 1

    async def answer(request: ScriptedRequest) -> list[int]:
        prompt = tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        said = rule(prompt, request) if wants_request else rule(prompt)  # type: ignore[call-arg]
        text = await said if inspect.isawaitable(said) else said
        return tokenizer.encode(text + end)

    return answer


def _positional(rule: TextRule) -> int:
    """How many arguments it takes by position and has no default for."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(rule).parameters.values()
    return sum(one.kind in kinds and one.default is one.empty for one in parameters)
