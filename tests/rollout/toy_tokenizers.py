"""Tokenizers small enough to make in a test: bytes as vocabulary, and the chat templates of real models in short."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3: earlier thoughts are dropped.
FORGETFUL = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if '</think>' in content and not loop.last %}{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Gemma: no system role. As base models' home-made ones: no token ends a turn.
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
NO_END = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_tokenizer(chat_template=CHATML, eos_token="<|endoftext|>"):
    """One id a byte; `<|im_start|>`, `<|im_end|>` and `<|endoftext|>` are special, the tool tags are added but not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.add_tokens([AddedToken(tag, special=False) for tag in ("<tool_call>", "<tool_response>", "</tool_response>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, chat_template=chat_template)
