"""First sentences for the teacher to continue, so that not every story starts with "Once upon a time"."""

from __future__ import annotations

import random
import re

FREE_SHARE = 1 / 3  # how many stories get no opening at all: the teacher's own way to begin

_WORDS = {
    "name": """Anna, Ben, Bella, Billy, Bobo, Clara, Daisy, Ella, Emma, Finn, Freddy, Grace, Hugo, Ivy, Jack, Jane,
        Kitty, Leo, Lily, Lucy, Max, Mia, Molly, Nina, Oliver, Oscar, Pip, Rosie, Sam, Sara, Sophie, Spot, Sue, Timmy,
        Toby, Tom, Tweety, Vera, Will, Zoe""",
    "animal": """ant, bear, bee, bird, bunny, cat, chick, cow, crab, deer, dog, dragon, duck, elephant, fish, fox, frog,
        giraffe, goat, hen, horse, kitten, lamb, lion, monkey, mouse, owl, panda, parrot, penguin, pig, pony, puppy,
        rabbit, sheep, snail, squirrel, tiger, turtle, whale, wolf, worm""",
    "person": """baker, boy, doctor, farmer, fisherman, girl, king, knight, mailman, man, pilot, prince, princess,
        queen, sailor, teacher, wizard, woman""",
    "relative": """his brother, his cousin, his dad, his grandma, his grandpa, his mom, his sister, his uncle, her aunt,
        her brother, her cousin, her dad, her grandma, her grandpa, her mom, her sister""",
    "adjective": """big, brave, busy, clever, curious, friendly, funny, gentle, grumpy, happy, hungry, kind, lazy,
        little, lonely, lucky, noisy, old, playful, polite, proud, quick, quiet, sad, shy, silly, sleepy, slow, small,
        smart, strong, tiny, wild, young""",
    "colour": "black, blue, brown, gold, green, grey, orange, pink, purple, red, silver, white, yellow",
    "thing": """apple, bag, ball, balloon, basket, bell, blanket, boat, book, bottle, box, button, cake, camera, candle,
        car, coat, cookie, crown, cup, doll, drum, flower, flute, hat, jar, jewel, kite, ladder, lamp, leaf, letter,
        map, mirror, pencil, pie, pillow, puzzle, ribbon, ring, robot, scarf, shell, shoe, spoon, star, stick, stone,
        sword, toy, train, truck, umbrella, wagon, whistle""",
    "place": """a big city, a cosy cave, a dark forest, a deep valley, a garden full of flowers, a green meadow,
        a house by the sea, a little cottage, a quiet village, a small town, a tall castle, a tall tree, the attic,
        the desert, the farm, the jungle, the mountains, the old barn, the park, the snowy hills, the warm sea,
        the woods, the zoo""",
    "weather": "chilly, cloudy, cold, foggy, hot, rainy, snowy, stormy, sunny, warm, wet, windy",
    "time": "afternoon, day, evening, morning, night",
    "activity": """bake bread, build towers, catch butterflies, climb trees, collect shells, count the stars, dance,
        dig in the sand, draw pictures, feed the ducks, fly kites, help people, juggle, jump in puddles,
        look at the moon, make new friends, paint, pick berries, plant seeds, play hide and seek, play the drums,
        read books, ride a bike, roll down the hill, run fast, sail boats, sing songs, skip, sleep all day, swim,
        tell jokes, watch the birds, write letters""",
}
WORDS = {kind: re.split(r",\s+", words) for kind, words in _WORDS.items()}

TEMPLATES = """\
{name} was a {adjective} {animal}.
{name} the {animal} was very {adjective}.
{name} was a {adjective} {person} who lived in {place}.
{name} loved to {activity}.
{name} did not like to {activity}.
{name} wanted to learn how to {activity}.
{name} had a {colour} {thing}.
{name} lost a {colour} {thing}.
{name} found a {adjective} {animal} in {place}.
{name} lived with {relative} in {place}.
{name} could not sleep.
{name} woke up early.
{name} was {adjective}, and that was a problem.
{name} and {name2} were
{name} and {name2} were best friends.
{name} and {name2} both wanted the {colour} {thing}.
{name} and {name2} liked to {activity} together.
{name} asked {relative} for a {thing}.
The {animal} lived in {place}.
The {adjective} {animal} wanted to {activity}.
The {animal} and the {animal2} were
The {colour} {thing} was
The {person} had a {adjective} {animal}.
The {person} looked everywhere for the {thing}.
A {adjective} {animal} sat in {place}.
A {animal} and a {animal2} met in {place}.
A {adjective} {person} lived in {place}.
One {weather} {time},
One {weather} {time}, {name} went to {place}.
One {time}, a {animal} found a {thing}.
It was a {weather} {time}.
It was a {weather} {time}, and {name} was {adjective}.
In {place} there was
In {place} there lived a {adjective} {animal}.
Far away, in {place},
Deep in {place},
Every {time}, {name} liked to {activity}.
Every {time}, the {animal}
There was a {colour} {thing} in {place}.
There once was a {adjective} {person}
Long ago, a {person} and a {animal}
When {name} was little,
On the way to {place}, {name}
Nobody knew why the {animal} was so {adjective}.
Today was a special day for {name}.
"Where is my {thing}?" asked {name}.
"Look, a {animal}!" said {name}.
"Can we go to {place}?" {name} asked {relative}.
"I want to {activity}," said the {animal}.
"Please help me," said the {adjective} {animal}.
"Wake up, {name}!" said {name2}.
"What is in the {colour} box?" asked the {animal}.
"I am not {adjective}!" said {name}.
""".splitlines()


def opening(rng: random.Random) -> str:
    """A random opening, empty when the teacher is to begin by itself."""
    if rng.random() < FREE_SHARE:
        return ""
    words = {kind: rng.choice(choices) for kind, choices in WORDS.items()}
    words["name"], words["name2"] = rng.sample(WORDS["name"], 2)
    words["animal"], words["animal2"] = rng.sample(WORDS["animal"], 2)
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", rng.choice(TEMPLATES).format(**words))
