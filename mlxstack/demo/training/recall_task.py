"""The user tells a word, and asks for it later."""

from mlxstack.demo.training import words
from mlxstack.demo.training.example import Draw, Message, says, user
from mlxstack.demo.training.phrase_templates import expand, request

WORD_THINGS = (
    "magic word",
    "magic word",
    "magic word",
    "magic word",
    "secret word",
    "code word",
    "password",
    "secret code",
    "keyword",
    "passphrase",
)
TELL = (
    "(Remember|Memorise|Memorize|Please remember|Please memorise|Keep in mind|Note|Do not forget|"
    "I want you to remember|Can you remember|Learn) (the|this|my) {thing}: {word}(.|) {end}|"
    "(Remember|Memorise|Please remember|Remember that) the {thing} is {word}(.|) {end}|(The|My|"
    "Our|The new|Today's) {thing} is {word}(.|) {end}|(The|My) {thing} is (\"{word}\"|'{word}'|"
    "`{word}`|{word})(.|) {end}|{word} is the {thing}(.|) {end}|(I tell you|Here is|This is) the "
    "{thing}: {word}(.|) {end}"
)
MORE_TELL = (
    "(Here is|Here comes|I have|You get) (a|the|your|my) {thing}( for you|): {word}(.|) {end}|"
    "(Save|Store|Keep|Write down|Learn|Take) (the|this|my) {thing}( for me|): {word}(.|) {end}|"
    "(The|My|Your) {thing} (will be|shall be|is now|is called) "
    "({word}|\"{word}\"|'{word}')(.|) {end}|"
    "{thing}(:| =| is) {word}(.|) {end}|"
    "(Let me tell you|You should know|You must know) (the|my|a) {thing}: (it is |){word}(.|) {end}"
)
TELL_END = (
    "|||Reply with one short sentence confirming you memorised it.|(Reply|Answer) (with|in) one "
    "(short |)sentence( confirming (that |)you (memorised|memorized|remember) it|).|(Please |"
    ")(confirm|confirm that you memorised it|just confirm|say OK|confirm briefly)(.|)|(Remember "
    "it|Do not forget it|I will ask you later|I will ask for it later|You will need it later)(.|)|"
    "(Got it|Can you remember that|Did you get it|OK)?"
)
TOLD = ("I have memorised the {thing} {word}.", "I will remember the {thing} {word}.")
ASK = (
    "(What is|What was|What's|Tell me|Say|Repeat|Give me|Can you tell me|Do you remember|Do you "
    "still know|Now tell me|So what is|And what was|Please tell me|Which was|Remind me of) (the|"
    "my|our) {thing}( again| now|, please| I told you| I gave you| I asked you to remember| I "
    "asked you to memorise| from before| from the beginning| you memorised| you memorized| you "
    "were told| then||||)(?|.|) {end}|What {thing} did I (tell you|give you|ask you to remember|"
    "ask you to memorise|mention)( before| earlier|)? {end}|(Which|What) (is|was) the {thing}(?|) "
    "{end}|{thing}?|(The|My) {thing}, please(.|) {end}"
)
ASK_WORD_ONLY = (
    "(Reply|Answer|Respond) with (only the {thing}|the {thing} only|the word only|just the word|"
    "only the word|the word|one word)(, nothing else|)(.|)|(Just|Only) (the {thing}|the word|one "
    "word)(, please|)(.|)|(Say|Give me|Write) (only|just) (the word|the {thing}|it)(.|)"
)


def tell(draw: Draw, thing: str, word: str) -> list[Message]:
    has_end = draw.rng.random() < 0.6
    end = ""
    if has_end:
        end = expand(draw.rng, TELL_END, draw.held_out, {})
    blanks = {"thing": thing, "word": word, "end": end}
    text = request(
        draw.rng, draw.rng.choice((TELL, TELL, MORE_TELL)), draw.held_out, blanks
    ).strip()
    answer = expand(draw.rng, TOLD[0] if "emori" in text else TOLD[1], draw.held_out, blanks)
    return [user(text), says(answer, f"The user tells me the {thing}. It is {word}.")]


def question(draw: Draw, thing: str, word: str) -> list[Message]:
    """The question for a word told before, and the answer."""
    is_bare = draw.rng.random() < 0.4
    end = ""
    if is_bare:
        end = expand(draw.rng, ASK_WORD_ONLY, draw.held_out, {"thing": thing})
    blanks = {"thing": thing, "word": word, "end": end}
    pattern = request(draw.rng, ASK, draw.held_out, blanks).strip()
    text = pattern[0].upper() + pattern[1:]
    is_bare = bool(end) and end in text
    answer = word if is_bare else f"The {thing} is {word}."
    return [user(text), says(answer, f"The user asks for the {thing}. It was {word}.")]


PERSONAL = (
    ("My name is {v}.", "(What is|What's|Do you remember|Tell me) my name?", "name"),
    ("I live in {v}.", "(Where do I live|In which city do I live|Where is my home)?", "city"),
    ("My favourite (city|place) is {v}.", "What is my favourite (city|place)?", "favourite city"),
    (
        "My (cat|pet) is called {v}.",
        "(What is my (cat|pet) called|What is the name of my (cat|pet))?",
        "pet's name",
    ),
    (
        "My project is called {v}.",
        "(What is my project called|What is the name of my project)?",
        "project's name",
    ),
)
PERSONAL_TOLD = {
    "name": "Nice to meet you, {v}!",
    "city": "I will remember that you live in {v}.",
    "favourite city": "I will remember that you like {v}.",
    "pet's name": "What a nice name, {v}!",
    "project's name": "I will remember the project {v}.",
}


def personal(draw: Draw) -> tuple[list[Message], list[Message], str]:
    """A fact about the user, the question for it, and the value."""
    statement, question, kind = draw.rng.choice(PERSONAL)
    source = words.PLACES if "city" in kind else words.NAMES
    value = words.pick(draw.rng, source, draw.held_out)
    if "project" in kind or draw.rng.random() < 0.3:
        value = words.magic_word(draw.rng, draw.held_out).capitalize()
    text = expand(draw.rng, statement, draw.held_out, {"v": value})
    telling = [
        user(text),
        says(PERSONAL_TOLD[kind].replace("{v}", value), f"I keep {value} in mind."),
    ]
    asking = user(expand(draw.rng, question, draw.held_out, {}))
    answer = says(f"Your {kind} is {value}.", f"The user asks for the {kind}. It is {value}.")
    return telling, [asking, answer], value
