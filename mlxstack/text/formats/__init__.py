"""Output formats, derived from chat templates or listed by family.

`syntax` describes an answer as a tree: marks of thoughts and calls, and a node for each call. Its
walks are `call_reader` (with one reader per node in `call_bodies`, `json_calls` and `tagged_calls`)
and `text.grammar.constrain`. `values` copies arguments as they come, `call_writer` sends them, and
`answer_reader` splits a whole answer. `repairs` lists what models write in place of their syntax.
"""
