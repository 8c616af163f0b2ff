"""Ten small faults in Python files, each with a failing test."""

from textwrap import dedent

from msgspec import Struct

TEST_FILE = "test.py"


class TextChange(Struct, frozen=True):
    """Replacement of a text in a file."""

    path: str
    old: str
    new: str


class RepairTask(Struct, frozen=True):
    """Files with a fault, and the test that it fails."""

    name: str
    files: dict[str, str]
    test: str
    repair: TextChange
    """One of the changes that pass the test: proof that the task can be solved."""


def _task(name: str, path: str, source: str, test: str, old: str, new: str) -> RepairTask:
    files = {path: dedent(source).lstrip()}
    return RepairTask(name, files, dedent(test).lstrip(), TextChange(path, old, new))


REPAIRS = (
    _task(
        "range one short",
        "total.py",
        """
        def total(n):
            \"\"\"Sum of 1 to n.\"\"\"
            result = 0
            for i in range(1, n):
                result += i
            return result
        """,
        """
        from total import total
        assert total(3) == 6, f"total(3) is {total(3)}, expected 6"
        """,
        "range(1, n)",
        "range(1, n + 1)",
    ),
    _task(
        "comparison turned",
        "largest.py",
        """
        def largest(numbers):
            best = numbers[0]
            for number in numbers:
                if number < best:
                    best = number
            return best
        """,
        """
        from largest import largest
        assert largest([3, 9, 4]) == 9, f"largest([3, 9, 4]) is {largest([3, 9, 4])}, expected 9"
        """,
        "number < best",
        "number > best",
    ),
    _task(
        "return missing",
        "area.py",
        """
        def area(width, height):
            result = width * height
        """,
        """
        from area import area
        assert area(2, 3) == 6, f"area(2, 3) is {area(2, 3)}, expected 6"
        """,
        "    result = width * height\n",
        "    return width * height\n",
    ),
    _task(
        "import missing",
        "circle.py",
        """
        def circumference(radius):
            return 2 * math.pi * radius
        """,
        """
        from circle import circumference
        assert round(circumference(1), 2) == 6.28
        """,
        "def circumference",
        "import math\n\n\ndef circumference",
    ),
    _task(
        "name misspelled",
        "greeting.py",
        """
        def greet(name):
            message = "Hello, " + nmae + "!"
            return message
        """,
        """
        from greeting import greet
        assert greet("Ada") == "Hello, Ada!"
        """,
        "nmae",
        "name",
    ),
    _task(
        "whole division",
        "mean.py",
        """
        def mean(numbers):
            return sum(numbers) // len(numbers)
        """,
        """
        from mean import mean
        assert mean([1, 2]) == 1.5, f"mean([1, 2]) is {mean([1, 2])}, expected 1.5"
        """,
        "//",
        "/",
    ),
    _task(
        "wrong key",
        "price.py",
        """
        PRICES = {"tea": 3, "coffee": 4}


        def price(order):
            return PRICES[order["drink"]] * order["amount"]
        """,
        """
        from price import price
        order = {"drink": "tea", "count": 2}
        assert price(order) == 6, f"price is {price(order)}, expected 6"
        """,
        'order["amount"]',
        'order["count"]',
    ),
    _task(
        "shared default",
        "basket.py",
        """
        def add(fruit, basket=[]):
            basket.append(fruit)
            return basket
        """,
        """
        from basket import add
        add("apple")
        assert add("pear") == ["pear"], "the default basket must be empty for each call"
        """,
        "def add(fruit, basket=[]):\n    basket.append(fruit)",
        "def add(fruit, basket=None):\n    basket = (basket or []) + [fruit]",
    ),
    _task(
        "quotes in a text",
        "label.py",
        """
        def label(text):
            return "'" + text + "'"
        """,
        """
        from label import label
        assert label("tea") == '"tea"', f"label is {label('tea')}, expected double quotes"
        """,
        '"\'" + text + "\'"',
        "'\"' + text + '\"'",
    ),
    RepairTask(
        "arguments in the wrong order",
        {
            "power.py": "def power(base, exponent):\n    return base ** exponent\n",
            "square.py": "from power import power\n\n\ndef square(x):\n    return power(2, x)\n",
        },
        "from square import square\n"
        'assert square(3) == 9, f"square(3) is {square(3)}, expected 9"\n',
        TextChange("square.py", "power(2, x)", "power(x, 2)"),
    ),
)
