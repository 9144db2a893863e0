"""Prompts of a probe: plain texts, and long ones made of them."""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from degarble.harness.probe.server import Prompt

# Written for this project: prose, numbers, code and lists, so that tokens of several kinds occur.
_TEXTS = """\
The lighthouse keeper climbed the stairs every evening at six. He cleaned the glass, trimmed the
wick and wrote the weather into a book. On calm nights he could hear the bell of the
---
Water boils at 100 degrees Celsius at sea level. At higher altitudes the air pressure is lower,
so that water boils at a lower temperature. On a mountain of 3000 metres it boils at about
---
def add(a, b):
    return a + b

def subtract(a, b):
    return a - b

def multiply(a, b):
---
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March, April,
---
The train from the coast was late again. Anna looked at the clock above platform four, folded
her newspaper and walked to the counter to ask when the next train to the city would
---
1, 2, 3, 4, 5, 6, 7, 8, 9, 10. 2, 4, 6, 8, 10, 12, 14, 16, 18, 20. 5, 10, 15, 20, 25, 30,
---
To make bread you need flour, water, salt and yeast. Mix them in a bowl, knead the dough for ten
minutes, cover it with a cloth and let it rest for an hour. Then heat the oven to
---
The heart is a muscle that pumps blood through the body. It has four chambers: two atria and two
ventricles. The left ventricle pumps blood that is rich in oxygen into the
---
SELECT name, price FROM products WHERE price > 100 ORDER BY price;
SELECT count(*) FROM
---
Dear Mr Brown, thank you for your letter of 3 March. We are pleased to tell you that your order
has been sent today. You will find the invoice enclosed. If you have any questions, please
---
Paris is the capital of France. Rome is the capital of Italy. Madrid is the capital of Spain.
Berlin is the capital of Germany. Vienna is the capital of Austria. Lisbon is the capital of
---
The old man and the boy carried the net down to the boat before sunrise. They did not speak.
When the first light came over the hills, the boy untied the rope and pushed the boat into the
---
A triangle has three sides and its angles add up to 180 degrees. A square has four equal sides.
A pentagon has five sides. A hexagon has six sides. A heptagon has seven sides. An octagon has
---
{"name": "Alice", "age": 31, "city": "London"}
{"name": "Bob", "age": 27, "city": "Oslo"}
{"name":
---
Plants take in carbon dioxide and water, and with the energy of light they make sugar and
oxygen. This process is called photosynthesis. It takes place in the green parts of the plant,
in small bodies that are called
---
for i in range(10):
    if i % 2 == 0:
        print(i, 'even')
    else:
        print(i,
---
The council met on Thursday to discuss the new bridge. Some members said that it was too
expensive. Others said that the old bridge would not last another winter. After three hours the
---
Gold has the symbol Au and the atomic number 79. Silver has the symbol Ag and the atomic number
47. Iron has the symbol Fe and the atomic number 26. Copper has the symbol Cu and the atomic
---
Once upon a time there was a king who had three daughters. The eldest was clever, the second was
brave, and the youngest could talk to birds. One morning the king called them and said:
---
Question: How many legs does a spider have? Answer: eight. Question: How many days does a week
have? Answer: seven. Question: How many months does a year have? Answer:
---
The wind turned to the north during the night and the rain became snow. By morning the road was
closed, the telephone was dead, and nobody in the village had seen the postman since
---
In 1969 two people walked on the moon for the first time. Their names were Neil Armstrong and
Buzz Aldrin. A third astronaut, Michael Collins, stayed in orbit. They came back to earth on
---
# Installation

1. Download the archive.
2. Unpack it.
3. Run `make install`.

# Usage

1. Open
---
The orchestra tuned for the last time and the lights went down. The conductor raised her hands.
For a moment there was no sound at all in the hall. Then the first violins began to"""
PASSAGES = tuple(_TEXTS.split("\n---\n"))


def long_ids(prompts: Sequence[Prompt], tokens: int, first: int = 0) -> tuple[int, ...]:
    """Return so many ids of prompts one after the other, begun at one of them."""
    ids = [prompt for prompt in prompts if isinstance(prompt, tuple)]
    whole = [number for n in range(len(ids)) for number in ids[(n + first) % len(ids)]]
    return tuple(islice(cycle(whole), tokens))


def long_text(texts: Sequence[str], characters: int, first: int = 0) -> str:
    """Return texts one after the other, begun at one of them, until there are enough characters."""
    made: list[str] = []
    size = 0
    for number, text in enumerate(cycle(range(len(texts)))):
        made.append(texts[(text + first + number // len(texts)) % len(texts)])
        size += len(made[-1]) + 1
        if size >= characters:
            return " ".join(made)
    raise AssertionError("a cycle does not end")
