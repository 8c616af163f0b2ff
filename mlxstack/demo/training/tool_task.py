"""Tools of a client, and exchanges that call one or none."""

import json
import random
from dataclasses import dataclass
from typing import Any

from mlxstack.demo.training import words
from mlxstack.demo.training.example import Draw, Message, calls, says, user
from mlxstack.demo.training.phrase_templates import expand, request
from mlxstack.demo.training.tool_values import RESULTS, VALUES


@dataclass(frozen=True)
class Skill:
    """A thing tools can do: names for it, its parameters, and how users ask for it.

    A request has `{v}` where the value of the first parameter goes, `{w}` for the second.
    """

    names: str
    about: str
    params: str
    value: str
    request: str
    result: str
    answer: str


SKILLS = (
    Skill(
        "get_weather|weather|current_weather|getWeather|weather_lookup|get_forecast",
        "(Get|Look up|Return) the (current |)weather (in|for|of) a (city|place|location)(.|)",
        "city|location|place|city_name",
        "place",
        "(What is|What's|How is|Tell me) the weather (like in|in|for) {v}( today| now|)(?|)|(Is "
        "it|Will it be) (warm|cold|sunny|raining|windy) in {v}( today|)?|Weather in {v}(, please|"
        ")(?|)|(Get|Check|Look up) the weather (in|for) {v}(.|, please.|)|Do I need an umbrella "
        "in {v}?|"
        "(How warm|How cold|How windy) (is it|will it be) in {v}( today| tomorrow|)?|"
        "(Give me|Show me|I want|I need) (the|a) (weather|forecast) (for|in|of) {v}(.|)|"
        "(Can|Could) you (check|look up|tell me) the (weather|forecast) (in|for) {v}?",
        "weather",
        "The weather in {v}: {r}.",
    ),
    Skill(
        "read_file|Read|readFile|cat_file|open_file|get_file|view_file",
        "(Read|Return|Show) (the content of a|a text|a) file( from disk|)(.|)",
        "path|file_path|filename|file",
        "path",
        "(Read|Open|Show me|Show|Display|Look at|Print) (the file |)(`{v}`|{v}|{v})( for me|, "
        "please|)(.|)|What (is|does it say) in {v}?|What is in the file {v}?|What does {v} (say|"
        "contain)?|"
        "(Can|Could) you (read|open|show|print) (me |)(the file |){v}?|(I want|I need) "
        "to (see|read) {v}(.|)|(Give me|Print|List) the (content|contents|text|lines) of {v}(.|)|"
        "(See|Check|View|Load|Inspect) (the file |){v}(.|, please.|)",
        "text",
        "The file {v} says: {r}.",
    ),
    Skill(
        "search|web_search|WebSearch|search_web|find_pages|google",
        "(Search|Look up things on) the (web|internet)(.|)|Search (the web |)for a query(.|)",
        "query|q|search_query|term",
        "topic",
        "(Search|Google|Look) (the web |the internet |)for {v}(.|, please.|)|(Search|Find) "
        "(pages|something|news) about {v}(.|, please.|)|(Do|Run) a (web |)search for {v}(.|)|"
        "(Can|Could) you (search|look) (the web |online |)for {v}?|(I need|Give me|Get me|Show me) "
        "(pages|something|results|links) (about|on|for) {v}(.|)|(What can you find|What is there) "
        "(online|on the web) about {v}?|(Look up|Google) {v}( online| on the web|)(.|, please.|)",
        "text",
        "I searched for {v} and found: {r}.",
    ),
    Skill(
        "run_command|Bash|bash|shell|run_shell|exec_command|execute|terminal",
        "(Run|Execute) a (shell |bash |)command( and return its output|)(.|)",
        "command|cmd|script",
        "command",
        "(Run|Execute|Please run|Start) (the command |the shell command |)(`{v}`|{v}|{v})(.|)|"
        "(Run|Execute) this( command|): {v}|Can you run (`{v}`|{v})?|"
        "(Try|Launch|Type|Enter|Use) (the command |this command: |this: |in the shell: |){v}(.|)|"
        "(In|With) (the|a|my) (shell|terminal|console)(,|:) (run |execute |start |do |)(`{v}`|{v})|"
        "(Could you|Please|Would you|I want you to) (run|execute|start|try) (this: |the command |)"
        "(`{v}`|{v})|(Command|Shell|Run|Execute|Start|Do)(:| this:| now:| the following:) {v}|"
        "What (is|do you get as) the output of (`{v}`|{v})?",
        "text",
        "The command printed: {r}.",
    ),
    Skill(
        "send_mail|send_email|sendMail|mail|write_mail",
        "Send (a mail|an email|an e-mail)( to somebody|)(.|)",
        "to,text|recipient,message|address,body|to,body",
        "mail,sentence",
        '(Send|Write) (a mail|an email|an e-mail|a message) to {v}(: {w}| saying "{w}"| with '
        'the text "{w}")|'
        "(Mail|Email) {v}: {w}|"
        "(Tell|Inform|Write to) {v}( by mail| by email|): {w}|"
        '(Mail|Email|Message) (to |for |){v}( saying| with the text|:) "{w}"|'
        "(Can|Could) you (mail|email|write to|send a mail to) {v}: {w}",
        "done",
        "The mail to {v} is on its way.",
    ),
    Skill(
        "write_file|Write|writeFile|save_file|create_file",
        "(Write|Save) (text|a text|content) (to|into) a file(.|)",
        "path,content|file_path,content|filename,text",
        "path,sentence",
        '(Write|Save|Put) "{w}" (to|into|in) (the file |){v}(.|)|(Create|Write) (the |a )file '
        '{v} with (the text|the content) "{w}"(.|)|'
        '(Store|Keep|Note|Put down) "{w}" (in|into) {v}(.|)|'
        '(Make|Create|Start) (a file |the file |){v} (that says|containing|saying) "{w}"(.|)|'
        '(Can|Could) you (write|save|put) "{w}" (to|in|into) {v}?',
        "done",
        "The file {v} is written.",
    ),
    Skill(
        "set_timer|timer|start_timer|set_alarm",
        "(Set|Start) a timer(.|)",
        "minutes|duration_minutes|duration",
        "number",
        "(Set|Start) a timer (for|of) {v} minutes(.|, please.|)|Wake me in {v} minutes(.|)|"
        "(Remind|Tell|Call|Warn) me (in|after) {v} minutes(.|)|(Can|Could) you (set|start) a timer "
        "(for|of) {v} minutes?|(I need|Give me|Make) a timer (for|of) {v} minutes(.|)|"
        "(Timer|Alarm)(:| for| in) {v} minutes(.|)|(Count|Wait) {v} minutes(.|)",
        "done",
        "The timer for {v} minutes is set.",
    ),
    Skill(
        "translate|translate_text|translate_word",
        "Translate a (text|word)( into another language|)(.|)",
        "text,language|word,target|text,target_language",
        "word,language",
        '(Translate|Please translate) (the word |)("{v}"|{v}) (to|into) {w}(.|)|What is {v} in '
        "{w}?|"
        "How do you say {v} in {w}?|"
        "(Say|Put|Turn|Render) (the word |){v} (in|into) {w}(.|, please.|)|"
        "(Can|Could) you (translate|say|put) {v} (to|into|in) {w}?|(Give me|Tell me|I need) (the |)"
        "{w} (word |)for {v}(.|)|What does {v} mean in {w}?",
        "word",
        "In {w}, {v} is {r}.",
    ),
    Skill(
        "calculate|calculator|evaluate|compute",
        "(Calculate|Evaluate) (an|a mathematical) expression(.|)",
        "expression|expr|formula",
        "expression",
        "(Calculate|Compute|Evaluate|How much is|What is) {v}(.|?|)|Use the calculator for {v}(.|)|"
        "(Can|Could) you (calculate|compute|work out) {v}?|(Work out|Solve|Find) {v}(.|, please.|)|"
        "(Tell me|Give me|I need) (the result of |){v}(.|)|(Result|Value) of {v}?",
        "number",
        "The result of {v} is {r}.",
    ),
    Skill(
        "get_time|current_time|time_in|getTime",
        "(Get|Tell) the (current |)time in a (city|place)(.|)",
        "city|timezone|place",
        "place",
        "What time is it in {v}( now|)?|(Tell me|What is) the( current|) time in {v}(?|.|)|"
        "(Give me|Check|Get|Show|Look up) the( current| local|) time (in|for|of) {v}(.|, please.|)|"
        "How late is it in {v}( now| at the moment|)?|(What|Which) hour is it in {v}( now|)?|"
        "(Can|Could) you (tell me|check) (the time|what time it is) in {v}?|(Time|Clock) in {v}"
        "(, please|)(?|.|)|Is it (late|early|morning|night|noon) in {v}( now| already|)?",
        "clock",
        "It is {r} in {v}.",
    ),
)
VERBS = words.listed(
    "fetch delete update create archive print check export cancel approve close start"
)
NOUNS = words.listed(
    "invoice ticket order user report booking project contract issue package device account"
)
NO_TOOL = "I have no tool for that."
FIELDS = words.listed(
    "input value target source data item key field argument content body subject title name label "
    "where what which whom arg0 arg1 param x y request object address region string line entry"
)


def made_up(draw: Draw) -> Skill:
    """An unseen tool: a verb and a noun, and a request in the same words."""
    while True:
        verb = draw.rng.choice(VERBS)
        noun = draw.rng.choice(NOUNS)
        if words.is_held_out(verb + noun) == draw.held_out:
            break
    name = draw.rng.choice((f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}"))
    return Skill(
        name,
        f"{verb.capitalize()} (a|an|the) {noun}( by its id|)(.|)",
        f"id|{noun}_id|{noun}|number",
        "id",
        f"(Please |Can you |Could you |Now |I want you to |You should |){verb} "
        f"(the |my |our |){noun} (number |with id |with the number |){{v}}(.|, please.|)",
        "done",
        f"The {noun} {{v}}: done.",
    )


def schema(rng: random.Random, kind: str, is_described: bool) -> dict[str, Any]:
    shape: dict[str, Any] = {"type": "integer" if kind == "number" else "string"}
    if is_described and rng.random() < 0.5:
        shape["description"] = f"The {kind}."
    return shape


def parameter_names(draw: Draw, skill: Skill) -> list[str]:
    """Parameter names; often random in training, so that they are not guessed."""
    usual = draw.rng.choice(skill.params.split("|")).split(",")
    if draw.held_out or draw.rng.random() < 0.4:
        return usual
    odd = draw.rng.sample(FIELDS + NOUNS, len(usual))
    return [
        f"{name}_{draw.rng.choice(FIELDS)}" if draw.rng.random() < 0.3 else name for name in odd
    ]


def listed(draw: Draw, skill: Skill) -> tuple[Message, list[str]]:
    """The tool in OpenAI's form under one of its names, and the names of its parameters."""
    rng = draw.rng
    params = parameter_names(draw, skill)
    is_described = rng.random() < 0.8
    kinds = skill.value.split(",")
    properties = {p: schema(rng, k, is_described) for p, k in zip(params, kinds, strict=True)}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = params
    function: dict[str, Any] = {"name": rng.choice(skill.names.split("|"))}
    if is_described:
        function["description"] = expand(rng, skill.about, draw.held_out, {})
    function["parameters"] = parameters
    return {"type": "function", "function": function}, params


def slot_file_store(draw: Draw, count: int) -> list[tuple[Skill, Message, list[str]]]:
    """`count` different tools, some of them made up."""
    skills = draw.rng.sample(SKILLS, count)
    skills = [made_up(draw) if draw.rng.random() < 0.25 else skill for skill in skills]
    return [(skill, *listed(draw, skill)) for skill in skills]


def argument(kind: str, text: str) -> str | int:
    return int(text) if kind == "number" else text


def use(draw: Draw, skill: Skill, tool: Message, params: list[str]) -> list[Message]:
    """Request, call, response, and an answer built from the response."""
    kinds = skill.value.split(",")
    values = [VALUES[kind](draw) for kind in kinds]
    blanks = {"v": values[0], "w": values[-1]}
    name = tool["function"]["name"]
    arguments = {p: argument(k, text) for p, k, text in zip(params, kinds, values, strict=True)}
    asked = user(request(draw.rng, skill.request, draw.held_out, blanks))
    call = calls(name, arguments, f"The tool {name} fits.")
    return [asked, call, *conclude(draw, skill, blanks)]


def conclude(draw: Draw, skill: Skill, blanks: dict[str, str]) -> list[Message]:
    if draw.rng.random() < 0.1:
        problem = draw.rng.choice(
            ("not found", "no permission", "timeout", "no such thing", "invalid input")
        )
        response = draw.rng.choice((f"Error: {problem}", f"error: {problem}"))
        return [
            {"role": "tool", "content": response},
            says(f"That did not work: {problem}.", "The tool failed."),
        ]
    result = RESULTS[skill.result](draw)
    key = draw.rng.choice(("result", "output", "content", "text"))
    is_wrapped = skill.result != "done" and draw.rng.random() < 0.2
    response = json.dumps({key: result}) if is_wrapped else result
    answer = expand(draw.rng, skill.answer, draw.held_out, {**blanks, "r": result.rstrip(".")})
    return [
        {"role": "tool", "content": response},
        says(answer, "The tool has answered. I tell the user."),
    ]


def no_fit(draw: Draw, shelved: list[Skill]) -> list[Message]:
    """A request for a tool that is not on the list."""
    absent = [skill for skill in SKILLS if skill not in shelved and skill.names[:4] != "calc"]
    skill = draw.rng.choice(absent)
    kinds = skill.value.split(",")
    values = [VALUES[kind](draw) for kind in kinds]
    asked = request(draw.rng, skill.request, draw.held_out, {"v": values[0], "w": values[-1]})
    return [user(asked), says(NO_TOOL, "No tool fits.")]
