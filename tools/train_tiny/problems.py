"""Makes reasoning problems in chat form: question, working in steps, answer; some are held out."""

import random
import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PLACES = ("ones", "tens", "hundreds", "thousands")
HELD_OUT_SHARE = 20  # one problem in this many is never trained on


@dataclass(frozen=True)
class Problem:
    form: str
    question: str
    working: str
    answer: str

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.question.encode()) % HELD_OUT_SHARE == 0

    @property
    def reply(self) -> str:
        """Return the model's reply after the generation prompt, without the end token."""
        return f"{self.working}\n</think>\n\n{self.answer}"


def is_correct(problem: Problem, text: str) -> bool:
    """Return whether a generated text ends its working and then gives exactly the answer."""
    _, closed, answer = text.partition("</think>")
    return bool(closed) and answer.strip() == problem.answer


def digit(number: int, place: int) -> int:
    return int(number // 10**place % 10)


def spaced(text: str) -> str:
    return " ".join(text)


def joined(rng: random.Random, openings: Sequence[str], lines: list[str], end: str) -> str:
    """Join an optional opening line, the steps and the end."""
    opening = rng.choice(openings)
    return "\n".join([*([opening] if opening else []), *lines, end])


def conclusion(rng: random.Random, digits: str, claim: str, result: int, check: str) -> str:
    ends = (f"so {claim} = {result}.", f"so the answer is {result}.")
    end = f"The digits are {spaced(digits)}, {rng.choice(ends)}"
    return end + (f"\n{check}" if rng.random() < 0.35 else "")


def addition(rng: random.Random) -> Problem:
    a, b = (rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 3))) for _ in range(2))
    lines, carry, written = [], 0, ""
    columns = max(len(str(a)), len(str(b)))
    for place in range(columns):
        x, y = digit(a, place), digit(b, place)
        total = x + y + carry
        step = f"{PLACES[place]}: {x} + {y} + {carry} = {total}"
        carry, written = total // 10, str(total % 10) + written
        lines.append(f"{step}, write {written[0]}, carry {carry}")
    if carry:
        lines.append(f"{PLACES[columns]}: write 1")
        written = "1" + written
    openings = ("", "Add column by column.", f"I add {a} and {b} from the right.")
    check = rng.choice((f"Check: {a + b} - {b} = {a}.", f"Check: {b} + {a} is the same."))
    end = conclusion(rng, written, f"{a} + {b}", a + b, check)
    return Problem("addition", f"What is {a} + {b}?", joined(rng, openings, lines, end), str(a + b))


def subtraction(rng: random.Random) -> Problem:
    pair = [rng.randrange(10 ** rng.choice((1, 2, 2, 3, 3, 3))) for _ in range(2)]
    a, b = max(pair), min(pair)
    lines, borrow, written = [], 0, ""
    for place in range(len(str(a))):
        x, y = digit(a, place), digit(b, place)
        rest = x - y - borrow
        step = f"{PLACES[place]}: {x} - {y} - {borrow}"
        if rest < 0:
            step += f" is below 0, so 1{x} - {y} - {borrow}"
        borrow, written = int(rest < 0), str(rest % 10) + written
        lines.append(f"{step} = {written[0]}, borrow {borrow}")
    openings = ("", "Subtract column by column.", f"I take {b} from {a}, from the right.")
    check = f"Check: {a - b} + {b} = {a}."
    end = conclusion(rng, written, f"{a} - {b}", a - b, check)
    return Problem(
        "subtraction", f"What is {a} - {b}?", joined(rng, openings, lines, end), str(a - b)
    )


def multiplication(rng: random.Random) -> Problem:
    a, b = rng.randrange(1, 10), rng.randrange(10, 100)
    low, high = digit(b, 0) * a, digit(b, 1) * a
    carry = low // 10
    total = high + carry
    lines = [
        f"ones: {digit(b, 0)} * {a} = {low}, write {low % 10}, carry {carry}",
        f"tens: {digit(b, 1)} * {a} = {high}, {high} + {carry} = {total}, "
        f"write {total % 10}, carry {total // 10}",
    ]
    written = f"{total % 10}{low % 10}"
    if total >= 10:
        lines.append(f"hundreds: write {total // 10}")
        written = f"{total // 10}{written}"
    openings = ("", "Multiply digit by digit.", f"I multiply each digit of {b} by {a}.")
    check = f"Check: {b} * {a} is the same."
    end = conclusion(rng, written, f"{a} * {b}", a * b, check)
    return Problem(
        "multiplication", f"What is {a} * {b}?", joined(rng, openings, lines, end), str(a * b)
    )


def near(rng: random.Random, number: int) -> int:
    """Draw another number that often shares leading digits with the first."""
    if rng.random() < 0.4:
        return rng.randrange(10 ** rng.randint(1, 4))
    place = rng.randrange(len(str(number)))
    step = 10**place
    return int(number // (step * 10) * step * 10 + rng.randrange(step * 10))


def compared(p: str, q: str) -> str:
    verdict = "the same" if p == q else f"{max(p, q)} is more"
    return f"{p} and {q}, {verdict}"


def larger(rng: random.Random) -> Problem:
    a = b = rng.randrange(10 ** rng.randint(1, 4))
    while a == b:
        b = near(rng, a)
    top = max(a, b)
    x, y = str(a), str(b)
    lines = [f"{n} is {spaced(n)}: {len(n)} digit{'s' * (len(n) > 1)}." for n in (x, y)]
    if len(x) != len(y):
        lines.append(f"{max(len(x), len(y))} digits are more than {min(len(x), len(y))}.")
    else:
        for place, (p, q) in zip(reversed(PLACES[: len(x)]), zip(x, y, strict=True), strict=True):
            lines.append(f"{place}: {compared(p, q)}")
            if p != q:
                break
    openings = ("", "Compare the lengths first.", f"I compare {a} and {b}.")
    end = rng.choice((f"So {top} is larger.", f"The larger one is {top}."))
    return Problem(
        "larger", f"Which is larger, {a} or {b}?", joined(rng, openings, lines, end), str(top)
    )


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def sorting(rng: random.Random) -> Problem:
    numbers = [rng.randrange(100) for _ in range(rng.randint(3, 5))]
    left, lines = list(numbers), []
    for _ in numbers:
        lines.append(f"{listed(left)}: the smallest is {min(left)}")
        left.remove(min(left))
    openings = ("", "Take the smallest each time.", f"There are {len(numbers)} numbers.")
    answer = listed(sorted(numbers))
    end = rng.choice((f"Sorted: {answer}", f"In order: {answer}"))
    return Problem(
        "sorting",
        f"Sort these numbers: {listed(numbers)}",
        joined(rng, openings, lines, end),
        answer,
    )


def some_word(rng: random.Random, words: Sequence[str]) -> str:
    if rng.random() < 0.5:
        return rng.choice(words)
    few = rng.random() < 0.3
    letters = rng.sample(string.ascii_lowercase, 3) if few else string.ascii_lowercase
    return "".join(rng.choice(letters) for _ in range(rng.randint(3, 10)))


def looked_up(rng: random.Random, letters: Sequence[str], marked: Sequence[str]) -> list[str]:
    """Write a step for each letter, each on its own line or all on one.

    The first line has "r yes", like every step with an r: to recognise the letter, the model only
    has to continue as it did after the same letter before. (It did not learn to see that two
    adjacent letters are equal.) A space precedes every letter, so that all have the same kind of
    token.
    """
    steps, count = [], 0
    for letter in letters:
        count += letter in marked
        steps.append(f"{letter} {'yes' if letter in marked else 'no'} {count}")
    named = f"Look for: {', '.join(f'{letter} yes' for letter in marked)}"
    each = [f"- {s}" for s in steps] if rng.random() < 0.5 else [f"Each: {', '.join(steps)}"]
    return [named, *each]


def counting(rng: random.Random, words: Sequence[str]) -> Problem:
    word = some_word(rng, words)
    letter = rng.choice(word) if rng.random() < 0.8 else rng.choice(string.ascii_lowercase)
    count = word.count(letter)
    lines = [f"The letters of {word} are {spaced(word)}.", *looked_up(rng, word, [letter])]
    openings = ("", "Spell the word.", f"I look for {letter}.")
    times = "once" if count == 1 else f"{count} times"
    end = rng.choice((f"So {letter} occurs {times}.", f"The count is {count}."))
    question = f"How many times does the letter {letter} occur in {word}?"
    return Problem("counting", question, joined(rng, openings, lines, end), str(count))


def blended(rng: random.Random, words: Sequence[str]) -> str:
    """Join one word's head and another's tail, so that their tokens have other neighbours."""
    first, second = rng.choice(words), rng.choice(words)
    return (first[: rng.randint(1, len(first))] + second[rng.randrange(len(second)) :])[:10]


def spelling(rng: random.Random, words: Sequence[str]) -> Problem:
    """Make a problem that teaches which letters a token has; no benchmark asks this."""
    kinds = rng.choices((some_word, blended), k=rng.randint(1, 5))
    some = [make(rng, words) for make in kinds]
    working = "\n".join(f"The letters of {word} are {spaced(word)}." for word in some)
    question = f"Spell the word{'s' * (len(some) > 1)} {', '.join(some)}."
    return Problem("spelling", question, working, ", ".join(map(spaced, some)))


def marking(rng: random.Random) -> Problem:
    """Make a problem of `counting` steps, with "yes" as often as "no"; no benchmark asks this."""
    marked = rng.sample(string.ascii_lowercase, rng.randint(1, 3))
    kinds = (marked, string.ascii_lowercase)
    letters = [rng.choice(rng.choice(kinds)) for _ in range(rng.randint(6, 16))]
    count = sum(letter in marked for letter in letters)
    question = f"How many of the letters {spaced(''.join(letters))} are {' or '.join(marked)}?"
    return Problem("marking", question, "\n".join(looked_up(rng, letters, marked)), str(count))


def digits(rng: random.Random) -> Problem:
    """Make a problem of `larger` steps, many at a time; no benchmark asks this."""
    drawn = [rng.choices("0123456789", k=2) for _ in range(rng.randint(4, 10))]
    pairs = [(p, p if rng.random() < 0.4 else q) for p, q in drawn]
    lines = [f"{rng.choice(PLACES)}: {compared(p, q)}" for p, q in pairs]
    question = f"Compare these digits: {', '.join(f'{p} {q}' for p, q in pairs)}"
    same = sum(p == q for p, q in pairs)
    return Problem("digits", question, "\n".join(lines), f"{same} the same")


def copying(rng: random.Random, words: Sequence[str]) -> Problem:
    """Make a problem of copying a list, forwards and backwards; no benchmark asks this."""
    if rng.random() < 0.6:
        items = [str(rng.randrange(10 ** rng.randint(1, 4))) for _ in range(rng.randint(2, 6))]
        what = "numbers"
    else:
        items, what = [some_word(rng, words) for _ in range(rng.randint(1, 4))], "words"
    text = ", ".join(items)
    if rng.random() < 0.5:
        return Problem("copying", f"Repeat these {what}: {text}", f"I repeat: {text}", text)
    back = ", ".join(reversed(items))
    return Problem("copying", f"Reverse these {what}: {text}", f"From the end: {back}", back)


Maker = Callable[[random.Random], Problem]
AUXILIARY = ("spelling", "copying", "marking", "digits")  # trained on, not evaluated


def makers(words: Sequence[str]) -> dict[str, Maker]:
    """Map each form's name to its maker; forms about words draw half of them from `words`."""
    return {
        "addition": addition,
        "subtraction": subtraction,
        "multiplication": multiplication,
        "larger": larger,
        "sorting": sorting,
        "counting": lambda rng: counting(rng, words),
        "spelling": lambda rng: spelling(rng, words),
        "copying": lambda rng: copying(rng, words),
        "marking": marking,
        "digits": digits,
    }


SHARES = {
    "addition": 0.06,
    "subtraction": 0.08,
    "multiplication": 0.04,
    "larger": 0.12,
    "sorting": 0.14,
    "counting": 0.24,
    "spelling": 0.18,
    "copying": 0.02,
    "marking": 0.08,
    "digits": 0.04,
}


def training_problems(count: int, words: Sequence[str], seed: int) -> list[Problem]:
    """Make `count` problems, none of which is held out."""
    rng, made = random.Random(seed), makers(words)
    problems: list[Problem] = []
    while len(problems) < count:
        form = rng.choices(list(SHARES), list(SHARES.values()))[0]
        problem = made[form](rng)
        if not problem.held_out:
            problems.append(problem)
    return problems


def held_out_problems(per_form: int, words: Sequence[str], seed: int) -> list[Problem]:
    """Make up to `per_form` different held-out problems of every form but the auxiliary ones."""
    rng, problems = random.Random(seed), {}
    for form, make in makers(words).items():
        if form in AUXILIARY:
            continue
        found = 0
        for _ in range(per_form * 400):
            problem = make(rng)
            if found < per_form and problem.held_out and problem.question not in problems:
                problems[problem.question] = problem
                found += 1
        if not found:
            raise ValueError(f"no held-out problem of the form {form}")
    return list(problems.values())
