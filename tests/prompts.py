"""Prompts for the comparison with transformers on the real model: English, Chinese, code, one token, a long text."""

from __future__ import annotations

LONG = (
    "A request enters the engine as text and leaves it as text; in between there are only numbers. The tokenizer cuts the "
    "text into pieces that occur often, and every piece has a number. The model turns the numbers into vectors, mixes the "
    "vectors with each other in one layer after another, and ends with one score for each entry of its vocabulary. The "
    "entry with the best score is the next token. It is appended to the request, and the whole thing begins again.\n\n"
    "Nothing in this loop is difficult, and yet it is slow, because each token needs every weight of the model. A "
    "processor can multiply far faster than it can fetch the numbers that it multiplies. When one request runs alone, the "
    "weights travel through the memory bus once for each token, and most of the arithmetic units wait. When thirty "
    "requests run together the weights travel once for thirty tokens. This is why engines batch, and it is the reason for "
    "nearly everything else that they do: a scheduler that decides who runs, a cache that remembers keys and values, a "
    "page table that lets the cache be cut into pieces of one size, and a tree that finds out which requests begin alike.\n"
    "\n第二个问题是内存。每个词元在每一层都留下一个键向量和一个值向量，后面的词元都要读它们。请求越长，占用的内存越多；"
    "请求越多，占用的内存也越多。如果为每个请求预留最大长度，大部分内存永远不会被使用。操作系统早就解决过同样的问题，"
    "办法是分页：内存被切成大小相同的页，按需分配，用完归还。\n\n"
    "```python\n"
    "def decode(model, ids, limit):\n"
    "    while len(ids) < limit:\n"
    "        scores = model(ids)\n"
    "        ids.append(max(range(len(scores)), key=scores.__getitem__))\n"
    "    return ids\n"
    "```\n\n"
    "The loop above is complete. It is also the slowest program that gives the right answer, for it computes every token "
    "of the past again whenever it wants one token of the future. In one sentence, the first thing to improve is"
)

# Text -> output tokens to compare. The long prompt gets few: an engine without a cache computes all of it every time.
PROMPTS: dict[str, int] = {
    "The": 16,  # one token
    "\n": 16,
    "The capital of France is": 16,
    "Once upon a time, in a village by the sea,": 16,
    "Q: What is 17 + 25?\nA:": 16,
    "To be, or not to be, that is": 16,
    "The three laws of thermodynamics are:\n1.": 16,
    "Dear Sir or Madam,\n\nI am writing to": 16,
    "WARNING!!! DO NOT": 16,
    "1, 1, 2, 3, 5, 8, 13,": 16,
    "| name | age |\n|---|---|\n| Ann | 31 |\n|": 16,
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n": 24,
    "请解释什么是 KV Cache？": 16,
    "从前有座山，山里有座庙，": 16,
    "北京是中国的": 16,
    "今天天气很好，我们一起去公园": 16,
    "日本語で自己紹介をしてください。": 16,
    "Ça coûte 12 € à l'été — naïve façade 🎉🎉": 16,
    "def fibonacci(n):\n    ": 20,
    "#include <stdio.h>\n\nint main(void) {\n": 16,
    "SELECT name, COUNT(*) FROM users WHERE": 16,
    '{"id": 1, "tags": ["a", "b"], "nested": {"x":': 16,
    "import torch\n\nclass RMSNorm(torch.nn.Module):\n    def __init__(self": 16,
    LONG: 4,
}

# Chats that SmolLM2 answers in a few tokens and ends itself.
CHATS: tuple[str, ...] = ("Say just the word hello.", "What is 2 + 2? Answer with one number.")
