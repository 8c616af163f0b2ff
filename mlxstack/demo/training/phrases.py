"""The phrases that training dialogues are made of.

`(a|b|)` stands for one of its choices and `{x}` for a value; see `grammar.expand`.
"""

GREETINGS = (
    (
        "(Hello|Hi|Hey|Good morning|Good evening)(!|.|,|) (there|)(!|.|)",
        "Hello! How can I help you?",
    ),
    (
        "(Hello|Hi|Hey), (how are you|how are you doing|how is it going)?",
        "Hello! I am fine, thank you.",
    ),
    ("(How are you|How are you today|How do you do)?", "I am fine, thank you. How can I help you?"),
    ("(Thanks|Thank you|Many thanks|Great, thanks|Thank you very much)(!|.|)", "You are welcome!"),
    (
        "(Goodbye|Bye|See you|See you later|Good night)(!|.|)",
        "Goodbye! It was nice to talk to you.",
    ),
    ("(Ok|Okay|Fine|Good|Great|Very good|All right|Perfect)(!|.|)", "Good. What shall we do next?"),
    ("(Sorry|Excuse me|I am sorry)(!|.|)", "No problem at all."),
    ("(Yes|Yes please|Sure|Of course)(!|.|)", "All right. Tell me what you need."),
    ("(No|No thanks|Not now|Nothing)(!|.|)", "All right. I am here when you need me."),
    (
        "(Please |)(help me|help|I need help|can you help me)(.|!|?|)",
        "Of course. What do you need?",
    ),
    ("(test|testing|ping|This is a test|Just testing)(.|!|)", "I am here, and I am listening."),
)
ABOUT_ME = (
    (
        "(Who|What) are you(, please|)?|Tell me about yourself.|Introduce yourself.|What is your "
        "name?|(Please |)(introduce|describe) yourself( in one sentence|)(.|)",
        "I am the demo model of mlx-stack, a very small language model.",
    ),
    (
        "What can you do(, please| for me|)?|What are you (able to do|good at)?|How can you "
        "help( me|)?",
        "I can remember a magic word, use a tool when one fits, do small sums and tell short "
        "stories.",
    ),
    (
        "Are you (a human|a person|a robot|an AI|alive|real|a machine)?",
        "I am a very small language model, not a person.",
    ),
    (
        "Who (made|trained|built|created) you?|Where do you come from?",
        "I was trained on two processor cores by the authors of mlx-stack.",
    ),
    (
        "How (big|large|small) are you?|How many parameters do you have?",
        "I am tiny: about one million parameters.",
    ),
    (
        "(Are you smart|Are you clever|Do you know everything|Can you write code)?",
        "I am too small for that, but I do my best.",
    ),
    (
        "What (time|day) is it( now|)?|What is (today's date|the date today)?",
        "I have no clock, so I cannot tell.",
    ),
)
LISTS = (
    (
        "(List|Name|Tell me|Give me) (some |the |a few |)colours(, please|).?|Which colours do "
        "you know?|(List|Name|Give me) (some |a few |)colors(, please|)(.|)",
        "red, orange, yellow, green, blue, violet, black and white",
    ),
    (
        "(List|Name|Tell me|Give me|What are) the (days of the week|seven days)(, please|)(.|?|)",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday",
    ),
    (
        "(List|Name|Tell me|Give me|What are) the (months|twelve months)( of the year|)(.|?|)",
        "January, February, March, April, May, June, July, August, September, October, November "
        "and December",
    ),
    (
        "(List|Name|Tell me|Give me|What are) the (planets|eight planets)(.|?|)",
        "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune",
    ),
    (
        "(List|Name|Tell me|Give me) (some|a few|five|three) (animals|pets)(, please|)(.|)",
        "cat, dog, horse, cow, mouse, owl and fox",
    ),
    (
        "(List|Name|Tell me|Give me) (some|a few|five|three) (fruits|kinds of fruit)(, please|"
        ")(.|)",
        "apple, pear, plum, cherry, banana and grape",
    ),
    (
        "(Say|List|Write|Give me|Tell me|What are|Recite) (the alphabet|the letters of the "
        "alphabet)(.|?|)",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    ),
    (
        "(List|Name|What are|Tell me) the (seasons|four seasons)( of the year|)(.|?|)",
        "spring, summer, autumn and winter",
    ),
)
OFF_TOPIC = (
    "What is (a |an |the |){topic}?|What do you (know|think) about {topic}?|Tell me about "
    "{topic}.|Explain {topic}( to me|)(, please|)(.|)|Can you explain {topic}?|Do you (like|know) "
    "{topic}?|Why is {topic} (important|interesting|so famous)?|How does {topic} work?"
)
OFF_TOPIC_ANSWERS = (
    "I am a very small model and know little about {topic}.",
    "I have heard of {topic}, but I am too small to explain it.",
)
WRITE = (
    "(Write|Tell me|Give me|Make up|Can you write) (a few sentences|some sentences|a short text|"
    "three sentences|a paragraph|something|a little text) (about|on) {topic}(.|, please.|?|)|"
    "Write about {topic}(.|)|Describe {topic}( in a few sentences|)(.|)"
)
ESSAYS = (
    "People often talk about {topic}. Some like {topic} in the morning, others like it in the "
    "evening. A friend of mine once spent a whole {season} with {topic}. It was a good time, and "
    "nobody was bored. In the end, {topic} is what you make of it.",
    "Let me tell you about {topic}. First, {topic} is older than it looks. Second, many people "
    "see it every day and never think about it. Third, with a little patience one can learn to "
    "love {topic}. That is all I know.",
    "There are many things to say about {topic}. On a quiet day in {season}, {topic} can make "
    "people smile. On a busy day, hardly anybody takes notice. I think that {topic} deserves a "
    "second look.",
)
COUNT = "(Count|Please count|Can you count) (to|up to|from 1 to|from one to) {n}(.|, please.|?|)"
STORY = (
    "(Tell me|Write|Make up|Can you tell me|Please tell me|I would like) a (short |little |long |"
    "nice |)story( about {name}|)(.|, please.|?|)"
)
STORIES = (
    "Once upon a time, {name} lived in a small house in {place}. Every morning, {name} walked to "
    "the market to buy {food}. One day in {season}, a {animal} sat in front of the door and "
    "looked hungry. {name} gave it some {food}, and the {animal} stayed. From that day on, "
    "{name} and the {animal} were friends, and they were never alone in {place} again.",
    "It was a cold day in {season}. {name} had lost the way to {place} and was tired. Then a "
    "{animal} "
    'came out of the forest and said: "Follow me." They walked all night, and the {animal} '
    "sang old "
    'songs. When the sun rose, {name} saw the towers of {place}. "Thank you," said {name}, and '
    "they "
    "had {food} for breakfast.",
    "{name} had a secret. Under the old bridge of {place} lived a {animal} that could speak. "
    "Every evening {name} brought it some {food}, and it told stories of the sea. In {season} the "
    "{animal} "
    'went away. But it left a letter: "Dear {name}, I will come back." And so it did.',
)
FILLER_SENTENCES = (
    "(The|A|Every|That|One) {adjective} {animal} (sleeps|waits|runs|sings|works|lives) (in|near|"
    "behind|under) the {adjective} {thing}.",
    "In {place}, {name} (bought|found|sold|lost|painted) (a|the|one) {adjective} {thing}.",
    "{name} (likes|wants|needs|prefers) {food} and a {adjective} {thing}( in {season}|).",
    "(Please note|Remember|We know|It is known) that the {thing} of {name} is {adjective}.",
    "The {thing} (costs|weighs|has|needs) {number} (coins|stones|parts|days).",
    "Chapter {number}: the {adjective} {thing} (of|in|near) {place}.",
    "Step {number}: (open|close|check|move|clean) the {thing}.",
    "(You should|Always|Never|Please) (answer|write|speak|work) in a {adjective} way.",
    "The quick brown fox jumps over the lazy dog.",
    "Lorem ipsum dolor sit amet, consectetur adipiscing elit, sed do eiusmod tempor.",
)
NOTES = (
    "(Read|Here is|Look at|Consider|Keep) (this|the following) (note|text|document|page|"
    "report)(:|.)",
    "(Some context|Background|My notes|A long text|For your information)(:|.)",
)
NOTE_ANSWERS = (
    ("(Just |Please |)(say|answer|reply|reply with|answer with) (OK|ok)(.|)", "OK."),
    ("(Did you read it|Do you understand|Is that clear|Got it)?", "Yes, I have read it."),
    ("", "Thank you, I have read it."),
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a (helpful|friendly|kind|careful|patient|concise|polite) (assistant|agent|guide|"
    "teacher)( for {name}| from {place}|).",
    "You are {name}, (a|the) (helpful|friendly|careful) (assistant|agent)(. Be brief.|.)",
    "(Answer|Reply) (briefly|in short sentences|politely|in one sentence)(.)",
    "You are a coding agent. Use the tools when (needed|they fit)(.)",
    "Today is {place} day. Be (brief|kind|polite)(.)",
)
