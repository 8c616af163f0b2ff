"""Call formats that no model has, to be derived from their templates without a line of code."""

from tests.features.formats.formats import EACH, PAIRS, TEXT, Format

THOUGHT = "{%- if m.reasoning_content %}{{- 'OPEN' + m.reasoning_content + 'CLOSE' }}{%- endif %}"


def thinking(opens: str, closes: str) -> str:
    return THOUGHT.replace("OPEN", opens).replace("CLOSE", closes)


INVENTED = {
    # Tags that name the types of their values, all calls in a section.
    "runes": Format(
        "{%- if m.tool_calls %}{{- '<deeds>' }}" + EACH
        + "{{- '<deed who=\"' + f.name + '\">' }}" + PAIRS
        + "{{- '<with what=\"' + k + '\" kind=\"' + ('words' if v is string else 'data') + '\">' }}"
        "{{- " + TEXT + " + '</with>' }}{%- endfor %}{{- '</deed>' }}{%- endfor %}"
        "{{- '</deeds>' }}{%- endif %}",
        added=("<deeds>", "</deeds>"),
        reminder="<deeds></deeds>",
        thoughts=thinking("<muse>", "</muse>\\n"),
    ),
    # One JSON list with other keys than those of any model.
    "ledger": Format(
        "{%- if m.tool_calls %}{{- '[ORDERS][' }}" + EACH
        + "{{- '{\"order_id\": \"' + c.id + '\", \"verb\": \"' + f.name + '\", \"details\": ' }}"
        "{{- (f.arguments | tojson) + '}' + ('' if loop.last else ', ') }}{%- endfor %}"
        "{{- '][/ORDERS]' }}{%- endif %}",
        special=("[ORDERS]", "[/ORDERS]"),
        reminder="[ORDERS][][/ORDERS]",
        thoughts=thinking("[MULL]", "[/MULL]"),
    ),
    # Name and id between marks, then JSON, each call with marks of its own.
    "relay": Format(
        EACH + "{{- '<|dial|>' + f.name + '<|line|>' + c.id + '<|say|>' }}"
        "{{- (f.arguments | tojson) + '<|hangup|>\\n' }}{%- endfor %}",
        special=("<|dial|>", "<|line|>", "<|say|>", "<|hangup|>"),
        reminder="<|dial|><|hangup|>",
        thoughts=thinking("<|ponder|>", "<|/ponder|>"),
    ),
    # One tag for each argument, with text as JSON.
    "script": Format(
        EACH + "{{- '<run ' + f.name + '>\\n' }}" + PAIRS
        + "{{- '<let ' + k + ' := ' + (v | tojson) + '/>\\n' }}{%- endfor %}"
        "{{- '</run>\\n' }}{%- endfor %}",
        reminder="<run now></run>",
        thoughts=thinking("<draft>", "</draft>"),
    ),
    # The name is the only key of an object.
    "keyed": Format(
        EACH + "{{- '<do>{\"' + f.name + '\": ' + (f.arguments | tojson) + '}</do>' }}"
        "{%- endfor %}",
        reminder="<do></do>",
        thoughts=thinking("<inner>", "</inner>"),
    ),
    # Attributes of one XML element, their values as JSON.
    "element": Format(
        EACH + "{{- '<invoke tool=\"' + f.name + '\"' }}" + PAIRS
        + "{{- ' ' + k + '=' + (v | tojson) }}{%- endfor %}{{- '/>\\n' }}{%- endfor %}",
        reminder='<invoke tool=""/>',
        thoughts=thinking("<aside>", "</aside>"),
    ),
    # A line for each argument, between two marks.
    "lines": Format(
        EACH + "{{- '<|act|>' + f.name }}" + PAIRS
        + "{{- '\\n' + k + ' = ' + (v | tojson) }}{%- endfor %}{{- '\\n<|done|>' }}{%- endfor %}",
        special=("<|act|>", "<|done|>"),
        reminder="<|act|><|done|>",
        thoughts=thinking("<|mind|>", "<|/mind|>"),
    ),
    # A JSON list behind the number of its calls.
    "counted": Format(
        "{%- if m.tool_calls %}{{- '<|batch|>' + (m.tool_calls | length | string) + '<|of|>[' }}"
        + EACH + "{{- '{\"op\": \"' + f.name + '\", \"given\": ' + (f.arguments | tojson) + '}' }}"
        "{{- '' if loop.last else ', ' }}{%- endfor %}{{- ']<|/batch|>' }}{%- endif %}",
        special=("<|batch|>", "<|of|>", "<|/batch|>"),
        reminder="<|batch|><|/batch|>",
        thoughts=thinking("[SCRATCH]", "[/SCRATCH]"),
    ),
    # The content has a section of its own, which closes before that of the calls opens.
    "sections": Format(
        "{{- '<|out|>say<|as|>' }}{%- if m.tool_calls %}{{- '<|in|>acts<|as|>' }}" + EACH
        + "{{- '<|in|>act of=\"' + f.name + '\" nr=\"' + (loop.index | string) + '\"<|as|>' }}"
        + PAIRS
        + "{{- '<|in|>part key=\"' + k + '\" type=\"' + ('string' if v is string else 'null'"
        " if v is none else 'data') + '\"<|as|>' + " + TEXT + " + '<|out|>part<|as|>' }}"
        "{%- endfor %}{{- '<|out|>act<|as|>' }}{%- endfor %}{{- '<|out|>acts<|as|>' }}"
        "{%- endif %}{{- '<|out|>turn<|as|>' }}",
        special=("<|in|>", "<|out|>", "<|as|>"),
        reminder="<|in|>acts<|as|>",
        thoughts=thinking("<|in|>muse<|as|>", "<|out|>muse<|as|>") + "{{- '<|in|>say<|as|>' }}",
    ),
    # Python calls one after the other, without a list.
    "statements": Format(
        "{%- if m.tool_calls %}{{- '<steps>\\n' }}" + EACH + "{{- f.name + '(' }}" + PAIRS
        + "{{- k + '=' + ('None' if v is none else 'True' if v is true else 'False' if v is false"
        " else v | tojson) + ('' if loop.last else ', ') }}{%- endfor %}{{- ')\\n' }}"
        "{%- endfor %}{{- '</steps>' }}{%- endif %}",
        reminder="<steps></steps>",
        thoughts=thinking("<hush>", "</hush>"),
    ),
    # Python calls whose text has no quotes.
    "unquoted": Format(
        "{%- if m.tool_calls %}{{- '<walk>[' }}" + EACH + "{{- f.name + '(' }}" + PAIRS
        + "{{- k + '=' + (v | string) + ('' if loop.last else ', ') }}{%- endfor %}{{- ')' }}"
        "{{- '' if loop.last else ', ' }}{%- endfor %}{{- ']</walk>' }}{%- endif %}",
        reminder="<walk></walk>",
        thoughts=thinking("<still>", "</still>"),
    ),
    # Python calls all of whose values are quoted as they are.
    "all quoted": Format(
        "{%- if m.tool_calls %}{{- '<run>[' }}" + EACH + "{{- f.name + '(' }}" + PAIRS
        + "{{- k + '=\"' + (v | string) + '\"' + ('' if loop.last else ', ') }}{%- endfor %}"
        "{{- ')' }}{{- '' if loop.last else ', ' }}{%- endfor %}{{- ']</run>' }}{%- endif %}",
        reminder="<run></run>",
        thoughts=thinking("<calm>", "</calm>"),
    ),
    # The name stands in a header, and in the call itself.
    "named twice": Format(
        EACH + "{{- '<|errand|>' + f.name + '<|slip|>{\"name\": \"' + f.name + '\", \"args\": ' }}"
        "{{- (f.arguments | tojson) + '}<|/errand|>' }}{%- endfor %}",
        special=("<|errand|>", "<|slip|>", "<|/errand|>"),
        reminder="<|errand|><|/errand|>",
        thoughts=thinking("<idle>", "</idle>"),
    ),
    # A line of JSON for each call, all in a section.
    "rows": Format(
        "{%- if m.tool_calls %}{{- '<rows>\\n' }}" + EACH
        + "{{- '{\"do\": \"' + f.name + '\", \"with\": ' + (f.arguments | tojson) + '}\\n' }}"
        "{%- endfor %}{{- '</rows>' }}{%- endif %}",
        reminder="<rows></rows>",
        thoughts=thinking("<mum>", "</mum>"),
    ),
    # The content has a mark before it only where a thought is.
    "answered": Format(
        EACH + "{{- '<go>{\"name\": \"' + f.name + '\", \"arguments\": ' }}"
        "{{- (f.arguments | tojson) + '}</go>' }}{%- endfor %}",
        reminder="<go></go>",
        thoughts=thinking("<|musing|>", "<|done|><|begin|>reply"),
        special=("<|musing|>", "<|done|>", "<|begin|>"),
    ),
}  # fmt: skip

VALUE = (
    """
{%- macro tags(v, p) -%}
{%- if v is mapping -%}
{%- for k, one in v.items() -%}
{{- p + '<' + k + '>' + tags(one, p) + p + '</' + k + '>' }}
{%- endfor -%}
{%- elif v is iterable and v is not string -%}
{%- for one in v %}{{- p + '<entry>' + tags(one, p) + p + '</entry>' }}{%- endfor -%}
{%- else -%}
{{- """
    + TEXT
    + """ -}}
{%- endif -%}
{%- endmacro -%}
"""
)


def nested(prefix: str) -> str:
    """Calls whose objects and lists are nested tags, each behind a prefix."""
    return (
        VALUE
        + "{%- if m.tool_calls %}{%- set p = '"
        + prefix
        + "' %}{{- p + '<orders>\\n' }}"
        + EACH
        + "{{- p + '<order to=\"' + f.name + '\">' + tags(f.arguments, p) }}"
        "{{- p + '</order>\\n' }}{%- endfor %}{{- p + '</orders>' }}{%- endif %}"
    )


NESTED = {
    "prefixed": Format(
        nested("]<]own[>["),
        special=("]<]own[>[",),
        reminder="]<]own[>[<orders>]<]own[>[</orders>",
        thoughts=thinking("<mull>", "</mull>"),
    ),
    "unprefixed": Format(
        nested(""),
        added=("<orders>", "</orders>"),
        reminder="<orders></orders>",
        thoughts=thinking("<mull>", "</mull>"),
    ),
}  # fmt: skip
"""Formats of nested tags, which lose the types that the schema does not tell."""
