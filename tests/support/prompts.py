"""Prompts of both kinds that deepseek-tiny was trained for, and of awkward lengths."""

CODE = [
    "def fibonacci(n):", "import os\nimport sys\n\n", "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    ", "def read(self, size=-1):\n    ", 'if __name__ == "__main__":\n',
    "try:\n    import ssl\nexcept ImportError:\n", "def __repr__(self):\n    return ",
    "    def test_add(self):\n        self.assertEqual(", "with open(path, 'rb') as f:\n    ",
    "raise ValueError(", "return [x for x in ", "# Copyright", '"""Utilities for ',
    "from collections import ", "while True:\n    line = ", "def _parse_args(args):\n    parser = ",
    "@property\ndef name(self):\n", "async def main():\n    await ", "self._lock = threading.",
]  # fmt: skip
QUESTIONS = [
    "What is 47 + 85?", "What is 912 - 388?", "What is 7 * 86?", "Which is larger, 731 or 713?",
    "Sort these numbers: 42, 7, 19, 88", "How many times does the letter r occur in strawberry?",
    "What is 999 + 1?", "What is 100 - 100?", "What is 9 * 99?", "Which is larger, 8 or 1000?",
    "Sort these numbers: 5, 4, 3", "How many times does the letter z occur in banana?",
    "What is 3 + 4?", "What is 640 - 25?", "What is 2 * 11?",
    "Sort these numbers: 90, 12, 55, 31, 76", "How many times does the letter e occur in tree?",
]  # fmt: skip
