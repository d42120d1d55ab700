"""Conversations to prompts, through the model's chat template."""

from __future__ import annotations

from typing import Any

# Arguments of transformers' apply_chat_template, and names that it gives to the template: no variables of a request
_RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "conversations",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "self",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
)


def render_chat(tokenizer: Any, messages: list[dict[str, Any]], **template: Any) -> list[int]:
    """Token ids of a conversation; the arguments and errors are those of render_chat_text."""
    text = render_chat_text(tokenizer, messages, **template)  # first: it sees to it that there is a tokenizer
    return tokenizer.encode(text, add_special_tokens=False)


def check_text(what: str, text: str) -> None:
    """Raises ValueError for text with a lone surrogate, such as Python reads from input that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{what}: expected valid text, got a lone surrogate at index {e.start}") from None


def render_chat_text(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    enable_thinking: bool | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """The text of a conversation, special tokens in it.

    Args:
        tokenizer: a transformers tokenizer.
        messages: dicts with "role" and "content", at least one.
        enable_thinking: passed to the template where given (Qwen3's switch); short for chat_template_kwargs.
        chat_template_kwargs: variables for the template.
        chat_template: a Jinja template in place of the model's.
        add_generation_prompt: end with the opening of the assistant's turn.
        tools: function descriptions for the template.
    Raises:
        ValueError: no messages, a message without a role or with invalid text, no tokenizer or template, a reserved
            name among the variables, or the template refused the messages.
    """
    if not messages:
        raise ValueError("messages: expected at least one message, got none")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'messages[{i}]: expected a dict with "role" and "content", got {message!r}')
        if isinstance(message.get("content"), str):
            check_text(f"messages[{i}].content", message["content"])
    if tokenizer is None:
        raise ValueError("chat: the model has no tokenizer; pass token ids to generate()")
    if not (chat_template or tokenizer.chat_template):
        raise ValueError("chat: the model has no chat template; pass chat_template or use generate()")
    variables = dict(chat_template_kwargs or {})
    for name in _RESERVED:
        if name in variables:
            raise ValueError(f"chat_template_kwargs: expected variables of the template, got the reserved name {name}")
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    try:
        return tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **variables,
        )
    except Exception as e:  # templates raise Jinja's own errors, and plain ones for roles they do not know
        raise ValueError(f"chat: the model's chat template refused the messages: {e}") from e
