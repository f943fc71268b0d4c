"""Chats for tests: rows, a byte-level BPE with their special tokens, and chat templates
of three kinds.
"""

import json

# With marks around what the assistant says; without; and with headers, a begin of text
# and trimmed contents.
MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = """{%- for m in messages %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>' ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
HEADERS = (
    "{{ bos_token }}{% for m in messages %}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEMPLATES = {"marked": MARKED, "plain": PLAIN, "headers": HEADERS}
SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
WORDS = [
    "what",
    "is",
    "a",
    "list",
    "in",
    "python",
    "it",
    "holds",
    "values",
    "and",
    "you",
    "can",
    "add",
    "more",
    "of",
    "them",
    "é",
    "文",
]


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(count: int = 12) -> list[list[dict[str, str]]]:
    """Returns conversations of unequal length, every third with a system's turn."""
    chats = []
    for n in range(count):
        messages = [turn("system", "be brief")] if n % 3 == 0 else []
        for number in range(1 + n % 3):
            question = " ".join(
                WORDS[(n + 3 * i) % len(WORDS)] for i in range(4 + n % 5)
            )
            answer = " ".join(
                WORDS[(2 * n + i + number) % len(WORDS)] for i in range(2 + 3 * (n % 4))
            )
            messages += [
                turn("user", f"{question}?"),
                turn("assistant", f"{answer}.\n" if n % 4 else answer),
            ]
        chats.append(messages)
    return chats


def rows(kind: str, count: int = 12) -> list[dict]:
    """Returns rows of a kind: messages, prompt-completion (conversations), text
    (prompts and completions).
    """
    if kind == "messages":
        return [{"messages": chat} for chat in conversations(count)]
    if kind == "prompt-completion":
        return [
            {"prompt": chat[:-1], "completion": chat[-1:]}
            for chat in conversations(count)
        ]
    return [
        {"prompt": chat[-2]["content"], "completion": f" {chat[-1]['content']}"}
        for chat in conversations(count)
    ]


def write_rows(path, some):
    path.write_text("".join(json.dumps(row) + "\n" for row in some))
    return path


def write_tokenizer(folder, template="", *, begins=False):
    """Writes a Hugging Face folder of a tokenizer with a chat template; returns it.

    Args:
      begins: whether the tokenizer puts its begin of text before a text.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([" ".join(WORDS), "user assistant system"] * 9, trainer)
    made.add_special_tokens(list(SPECIAL))
    if begins:
        begin = (SPECIAL[0], made.token_to_id(SPECIAL[0]))
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin[0]} $A", special_tokens=[begin]
        )
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(made.to_str())
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(about | {"pad_token": SPECIAL[1]})
    )
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder
