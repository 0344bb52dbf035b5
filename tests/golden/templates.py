#!/usr/bin/env python3
"""Writes templates.json: chat templates, and what Jinja makes of them as transformers sets it up.

    pip install jinja2
    python3 tests/golden/templates.py         # or: templates.py OUTPUT_FILE

`snippets` are [template, context, text]; where Jinja refuses, the text is null, and where it refuses
with a message of the template's own, {"raised": message}. Those of `refused` are [template, context,
name]: Jinja renders them, and Fireclay is to refuse them by that name. `families` are templates in
the style of ten families of models, short and written for this file; `conversations` are contexts,
and `samples` has what each family makes of each conversation. The time is always `now`.
"""

import json
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "templates.json"
NOW = 1741529107


class Raised(TemplateError):
    pass


class Generation(Extension):
    """The assistant's part: rendered in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise Raised(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(format):
    return datetime.fromtimestamp(NOW, timezone.utc).replace(tzinfo=None).strftime(format)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
)
ENVIRONMENT.filters["tojson"] = tojson
ENVIRONMENT.globals["raise_exception"] = raise_exception
ENVIRONMENT.globals["strftime_now"] = strftime_now


def rendered(template, context):
    try:
        return ENVIRONMENT.from_string(template).render(**context)
    except Raised as raised:
        return {"raised": str(raised)}
    except Exception:
        return None


DATA = {
    "s": "Kiln, firing at 1260°C", "e": "", "n": 7, "f": 2.5, "t": True, "z": None,
    "l": [3, 1, 2], "w": ["clay", "Glaze", "ash"], "d": {"b": 1, "a": [True, None, 1.0], "items": "key"},
    "u": "<é'\"\n\\\u0001\u2028>",
    "m": [{"role": "user", "n": 2}, {"role": "tool", "n": 1}, {"role": "user", "n": 1, "x": {"y": "deep"}}],
}


def joined(text):
    """Without the breaks that keep lines short: a backslash, and the next line's indentation."""
    return re.sub(r"\\\n +", "", text)


# With DATA as the context.
SNIPPETS = joined(r"""
{% for x in l %}{% generation %}{{ x }}{% set n = x %}{% endgeneration %}{{ n }},{% endfor %}
a {%- generation -%}  b  {%- endgeneration -%}  c
{{ strftime_now('%d %b %Y') }}|{{ strftime_now("%Y-%m-%d %H:%M:%S %A %B %-d %j %p %f%%") }}|{{ strftime_now('') }}
{{ raise_exception('not ' ~ n ~ ' today') }}
{% if false %}{{ raise_exception('no') }}{% endif %}fine
{{ d | tojson }}|{{ u | tojson }}|{{ [1, 2.5, 1e20, -0.0, none, true] | tojson }}|{{ (1, 'a') | tojson }}|\
    {{ {1: 2, none: 3, true: 4} | tojson }}
{{ d | tojson(indent=2) }}|{{ [] | tojson(indent=2) }}|{{ [[], {}] | tojson(indent='--') }}|{{ l | tojson(indent=0) }}
{{ d | tojson(separators=(',', ':'), sort_keys=True) }}|{{ d | tojson(indent=1, separators=(' ,', ' : ')) }}
{{ u | tojson(ensure_ascii=True) }}|{{ '🏺' | tojson(ensure_ascii=true) }}|{{ '🏺' | tojson(true, none, [';', '=']) }}
{{ missing | tojson }}
{{ l.items | tojson }}
{{ d.keys() | tojson }}
{{ l }}|{{ d }}|{{ (1, 'a') }}|{{ (1,) }}|{{ () }}|{{ z }}|{{ t }}|{{ false }}|{{ [z, t, u] }}|{{ {} }}|{{ 1, 2 }}
{{ 1e20 }}|{{ 1.0 }}|{{ 1e16 }}|{{ 1e15 }}|{{ 0.0001 }}|{{ 0.00001 }}|{{ 1.5e-7 }}|{{ 123456789.125 }}|{{ 1/3 }}|\
    {{ -0.0 }}|{{ 1e400 }}|{{ 3.14e2 }}
{{ 18446744073709551616 }}|{{ 2 ** 100 }}|{{ -2 ** 70 }}|{{ 12345678901234567890 * 10 }}|{{ 1_000 }}|{{ 0xff }}|\
    {{ 0b11 }}
{{ ["it's", 'say "x"', 'both \' and "', 'tab\t', 'é', '\x7f', '\u200b', '🏺'] }}|{{ 'a' "b" }}
{{ 'a,b,c'.rsplit(',', 1) }}|{{ ' a  b c '.split() }}|{{ ' a  b c '.split(none, 1) }}|{{ ' a b  c '.rsplit(none, 1) }}|\
    {{ 'a,b,c'.split(',', 1) }}|{{ 'a</think>b'.split('</think>')[-1] }}|{{ ''.split() }}|{{ ''.split(',') }}|\
    {{ 'a b'.split(sep=' ', maxsplit=1) }}
{{ 'unfired'.removeprefix('un') }}|{{ 'fired'.removesuffix('ed') }}|{{ '7'.zfill(3) }}|{{ '-7'.zfill(4) }}|\
    {{ s.index('f') }}|{{ s.find('x') }}|{{ s.find('C', 3) }}|{{ s.rfind('i') }}|{{ 'é°x'.find('x') }}
{{ s.index('zzz') }}
{{ s.startswith(('a', 'Kiln')) }}|{{ s.endswith(('°C', 'x')) }}|{{ s.startswith('firing', 6) }}|{{ s.startswith(()) }}
{{ s.startswith(['Kiln']) }}
{{ "they're bill's kiln-ware".title() }}|{{ "they're (bill's) kiln-ware"|title }}|{{ 'kILN wARE'.capitalize() }}|\
    {{ 'kILN'|capitalize }}|{{ 'aBc'.swapcase() }}|{{ 'Ab'.upper() ~ 'Ab'.lower() }}
{{ '%s' % 5 }}|{{ '%s and %r' % ('a', 'b') }}|{{ '%d%%' % 7.9 }}|{{ '%05.1f' % 3.14159 }}|{{ '%-5s|' % 'ab' }}|\
    {{ '%5s' % 'ab' }}|{{ '%x %X %o' % (255, 255, 8) }}|{{ '%(a)s %(b)03d' % {'a': 1, 'b': 2} }}|\
    {{ '%e %g %g' % (12345.678, 0.00001, 1e9) }}|{{ '%+d % d' % (1, 2) }}|{{ '%s' % [1, 2] }}|{{ '%.2s' % 'abc' }}|\
    {{ '%c' % 'x' }}
{{ '%s %s' % 5 }}
{{ '%d' % 'x' }}
{{ 'x' % 5 }}
{{ '{} {}'.format(1, 'a') }}|{{ '{1}{0}'.format('a', 'b') }}|\
    {{ '{x:>5}|{y:.2f}|{z:05d}'.format(x='ab', y=2.005, z=42) }}|{{ '{:,}'.format(1234567) }}|\
    {{ '{0[b]} {0[a][2]}'.format(d) }}|{{ '{{}}'.format() }}|{{ '{!r:>4}'.format('a') }}|\
    {{ '{:^7}|{:<4}|{:+}|{:.1%}|{:x}'.format('mid', 1, 2, 0.256, 255) }}|{{ '{:*^9}'.format('x') }}
{{ "%s-%s"|format(1, 2) }}|{{ "%(a)s"|format(a=3) }}
{{ 'a long text of many words'|truncate(10) }}|{{ 'a long text of many words'|truncate(10, true) }}|\
    {{ 'a long text of many'|truncate(10, false, '…', 0) }}|{{ 'short'|truncate(3) }}|\
    {{ s|truncate(length=9, end='', leeway=0) }}
{{ 'two words, no 3-4 more'|wordcount }}|{{ ''|wordcount }}
{{ s.upper is callable }}|{{ s is callable }}|{{ raise_exception is callable }}|{{ missing is callable }}|\
    {{ d.items is callable }}|{{ strftime_now is defined }}|{{ range is callable }}
{{ missing|length }}|{{ missing }}|{{ missing|list }}|{{ missing|default('x') }}|{{ e|default('x') }}|\
    {{ e|default('x', true) }}|{{ z|default('x') }}|{{ missing is none }}|{{ missing == other }}|{{ missing ~ 'a' }}|\
    {{ 'a' in missing }}|{{ missing|first is defined }}|{% for x in missing %}{% endfor %}
{{ missing.attribute }}
{{ missing['item'] }}
{{ missing[1:] }}
{{ missing + 'a' }}
{{ z[1:] }}
{{ d[1:] }}
{{ l[:e] }}
{{ missing < 1 }}
{{ missing() }}
{{ d.missing.more }}
{{ d.missing }}|{{ d['missing'] is defined }}|{{ l[9] is defined }}|{{ z.x is defined }}|{{ s.nothing is defined }}|\
    {{ n.nothing }}
{{ d.items() }}|{{ d.keys() }}|{{ d.values() }}|{{ d.get('b') }}|{{ d.get('q') }}|{{ d.get('q', 5) }}|{{ d['items'] }}|\
    {{ d.items is string }}|{{ d.copy() == d }}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}\
    {% for k, v in d|items %}{{ loop.index }}{{ k }}{% endfor %}{% for k, v in d|dictsort %}{{ k }}{% endfor %}
{{ l.append(4) }}
{% set x = l.pop() %}
{{ d.update({'q': 1}) }}
{{ d.setdefault('b', 2) }}
{{ l.append is defined }}|{{ d.pop }}|{{ s.__class__ is defined }}
{{ l.count(1) }}|{{ l.index(2) }}|{{ (1, 2, 1).count(1) }}|{{ l.copy() }}
{{ l + [4] }}|{{ (1,) + (2,) }}|{{ [0] * 3 }}|{{ 'ab' * 2 }}|{{ 2 * 'ab' }}|{{ l[::-1] }}|{{ l[1:] }}|{{ s[-2:] }}|\
    {{ s[::5] }}|{{ s[:4] }}|{{ l[-1] }}|{{ s[0] }}|{{ (1, 2, 3)[:2] }}|{{ l[5:] }}|{{ l[-9:2] }}
{{ l + (4,) }}
{{ 'a' + 1 }}
{{ 'n: ' ~ n ~ ' ' ~ f ~ z ~ t ~ l }}|{{ 7 // 2 }}|{{ -7 // 2 }}|{{ -7 % 3 }}|{{ 7 % -3 }}|{{ 7.5 // 2 }}|\
    {{ -7.5 % 2 }}|{{ 4 / 2 }}|{{ 2 ** -1 }}|{{ 2 ** 3 ** 2 }}|{{ -2 ** 2 }}|{{ true + 1 }}|{{ 0.1 + 0.2 }}|\
    {{ -n|abs }}|{{ +n }}
{{ 1 / 0 }}
{{ 1 < 2 < 3 }}|{{ 1 < 3 < 2 }}|{{ 'a' < 'b' }}|{{ 1 == 1.0 }}|{{ true == 1 }}|{{ '1' == 1 }}|{{ [1, 2] == [1, 2] }}|\
    {{ (1,) == [1] }}|{{ [1, 2] < [1, 3] }}|{{ none == false }}|{{ not 1 == 2 }}|{{ 2 in l }}|{{ 5 not in l }}|\
    {{ 'iln' in s }}|{{ 'b' in d }}|{{ d == d.copy() }}
{{ 1 < 'a' }}
{{ 5 in s }}
{{ 1 in 5 }}
{{ e or 'x' }}|{{ e and 'x' }}|{{ n and 'x' }}|{{ '' and 'x' }}|{{ 0 or none }}|{{ [] or {} }}|{{ not '' }}|\
    {{ 'a' if e }}|{{ 'a' if n else 'b' }}|{{ 1 if 0 else 2 if 0 else 3 }}|{{ not not n }}|{{ 0.0 and 1 }}
{% for x in z %}{% endfor %}
{% for x in 5 %}{% endfor %}
{% for c in 'héy' %}{{ c }}.{% endfor %}{% for a, b in [(1, 2), [3, 4]] %}{{ a + b }};{% endfor %}\
    {% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}{% for x in 1, 2 %}{{ x }}{% endfor %}\
    {% for x in [] %}x{% else %}none{% endfor %}
{% for x in l if x != 1 %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex0 }}\
    {{ loop.previtem }}{{ loop.nextitem }} {% endfor %}
{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ loop.cycle('a', 'b') }}\
    {% if loop.index0 == 2 %}{% break %}{% endif %}{{ loop.changed(x > 0) }}{% endfor %}
{% for x in [1, [2, [3]]] recursive %}{% if x is iterable %}{{ loop(x) }}{% else %}{{ x }}@{{ loop.depth }}{% endif %}\
    {% endfor %}
{% set ns = namespace(a=1, b='x') %}{% for x in l %}{% set ns.a = ns.a + x %}{% set n = x %}{% endfor %}{{ ns.a }}\
    {{ ns.b }}{{ n }}{{ ns.c is defined }}{{ ns is mapping }}
{% set a, b = 1, [2] %}{{ a }}{{ b }}{% set x %}block {{ a }}{% endset %}{{ x }}{{ x is string }}\
    {% set y | upper | trim %} q {% endset %}{{ y }}{% set q = 1, 2 %}{{ q }}
{% macro m(a, b=2, c='x' ~ n) %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ m(1) }}|{{ m(1, c=3) }}|{{ m() }}|\
    {{ m(b=1, a=0)|upper }}|{{ m(1) is string }}|{{ m is callable }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro wrap(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro %}{% call wrap('b') %}in{{ n }}{% endcall %}\
    {% macro each(xs) %}{% for x in xs %}{{ caller(x) }}{% endfor %}{% endmacro %}\
    {% call(x) each(l) %}[{{ x }}]{% endcall %}
{% macro fact(k) %}{{ 1 if k < 2 else k * fact(k - 1)|int }}{% endmacro %}{{ fact(5) }}\
    {% macro first() %}{{ second() }}{% endmacro %}{% macro second() %}later{{ v }}{% endmacro %}{% set v = 9 %}\
    {{ first() }}
{% set ns = namespace(k=0) %}{% macro bump() %}{% set ns.k = ns.k + 1 %}{% set ns.j = 2 %}{% endmacro %}{{ bump() }}\
    {{ bump() }}{{ ns.k }}{{ ns.j }}
{% for x in [] %}{% else %}{% set q = 1 %}{{ q }}{% endfor %}{{ q is defined }}\
    {% set b %}{% set q = 2 %}{{ q }}{% endset %}{{ b }}{{ q is defined }}{% if t %}{% set q = 3 %}{% endif %}{{ q }}
{% raw %}
{{ a }}
{% endraw %}
end
{% filter upper %}text {{ s }}{% endfilter %}{% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}\
    {% filter replace('a', 'b')|title %}a cat{% endfilter %}
{% if n > 9 %}a{% elif n == 7 and not e %}b{% else %}c{% endif %}{% if l %}{{ l|length }}{% endif %}\
    {% if m|selectattr('role', 'equalto', 'none') %}always{% endif %}\
    {% if m|selectattr('role', 'equalto', 'none')|list %}never{% endif %}
{{ m|map(attribute='role')|list }}|{{ m|map(attribute='x.y', default='-')|join(',') }}|\
    {{ m|selectattr('role', 'eq', 'user')|map(attribute='n')|sum }}|{{ m|rejectattr('x')|list|length }}|\
    {{ w|map('upper')|join(' ') }}|{{ l|select('odd')|list }}|{{ l|reject('>', 1)|list }}|\
    {{ w|map('replace', 'a', 'o')|list }}|{{ m|selectattr('role', 'in', ['tool'])|first }}|\
    {{ m|map(attribute='n')|unique|list }}
{{ m|map('upper')|length }}
{{ l|sort }}|{{ l|sort(reverse=true) }}|{{ w|sort }}|{{ w|sort(case_sensitive=true) }}|\
    {{ m|sort(attribute='n,role')|map(attribute='role')|join }}|{{ w|max }}|{{ l|min }}|{{ []|max is defined }}|\
    {{ m|max(attribute='n') }}|{{ l|sum(start=10) }}|{{ l|reverse|list }}|{{ s|reverse }}|{{ l|first }}{{ l|last }}|\
    {{ ['a', 'A', 'b']|unique|list }}|{{ l|batch(2, 'x')|list }}|{{ l|slice(2)|list }}
{% for g in m|groupby('role') %}{{ g.grouper }}:{{ g.list|length }}{{ g[1][0].n }} {% endfor %}\
    {% for role, ms in m|groupby('role') %}{{ role }}{{ ms|length }}{% endfor %}\
    {{ d|dictsort(reverse=true)|map('first')|list }}
{{ [1, 'a']|sort }}
{{ '5'|int + 1 }}|{{ '5.9'|int }}|{{ 'x'|int }}|{{ 'x'|int(-1) }}|{{ '0x1F'|int(base=16) }}|{{ 3.9|int }}|\
    {{ ' 7_0 '|int }}|{{ '1.5'|float }}|{{ 'x'|float }}|{{ 3|float }}|{{ none|int }}|{{ 2.5|round }}|\
    {{ 3.14159|round(2) }}|{{ 2.1|round(0, 'ceil') }}|{{ 2.19|round(1, 'floor') }}|{{ 5|round }}|{{ -3|abs }}|\
    {{ 5|string + '!' }}|{{ 1.0|string }}
{{ missing|int }}
{{ '  x '|trim }}|{{ 'xxaxx'|trim('x') }}|{{ ' a '.strip() }}|{{ 'xay'.strip('xy') }}|{{ '\n a'.lstrip() }}|\
    {{ 'a \n'.rstrip() }}|{{ 'a\nb'|indent }}|{{ 'a\n\nb'|indent(2, true) }}|{{ 'a\n\nb'|indent('>>', blank=true) }}|\
    {{ 'abc'|replace('b', 'x') }}|{{ 'aaa'|replace('a', 'b', 2) }}|{{ 'aaa'.replace('a', 'b', 1) }}|\
    {{ 'x'|center(5) }}|{{ 'ab'.center(5, '*') }}|{{ 'a'.ljust(3, '.') }}{{ 'a'.rjust(3) }}
{{ ['a', 'b']|join(', ') }}|{{ [1, none, true]|join('-') }}|{{ ', '.join(w) }}|{{ m|join(',', attribute='role') }}|\
    {{ 'abc'|list }}|{{ d|list }}|{{ 'a\nb\r\nc'.splitlines() }}|{{ 'a\nb\n'.splitlines(true) }}|\
    {{ 'a=b=c'.partition('=') }}|{{ 'a=b=c'.rpartition('=') }}|{{ 'banana'.count('an') }}|{{ 'a\tb'.expandtabs(4) }}
{{ ','.join([1, 2]) }}
{{ 'abc'.isalpha() }}{{ 'a1'.isalnum() }}{{ '12'.isdigit() }}{{ ''.isdigit() }}{{ 'Ab'.isupper() }}\
    {{ 'ab1'.islower() }}{{ '1'.islower() }}{{ ' \n'.isspace() }}{{ 'Ab Cd'.istitle() }}{{ 'é'.isascii() }}\
    {{ '7'.isnumeric() }}
{{ n is number }}{{ n is integer }}{{ f is float }}{{ t is integer }}{{ t is number }}{{ t is boolean }}\
    {{ s is string }}{{ d is mapping }}{{ l is sequence }}{{ d is sequence }}{{ s is sequence }}{{ n is iterable }}\
    {{ s is iterable }}{{ z is none }}{{ t is true }}{{ 1 is true }}{{ n is odd }}{{ n is even }}\
    {{ n is divisibleby 7 }}{{ n is divisibleby(2) }}{{ n is eq 7 }}{{ n is gt(5) }}{{ 'a' is in 'abc' }}\
    {{ 'a' is lower }}{{ z is sameas none }}{{ n is not none }}{{ d.items() is sequence }}{{ 'upper' is filter }}\
    {{ (1, 2) is sequence }}
{{ range(3) }}|{{ range(1, 7, 2)|list }}|{{ range(5, 0, -2)|list }}|{{ range(2)|sum }}|{{ dict(a=1, b=2) }}|\
    {{ dict([('x', 1)]) }}|{{ {'a': 1, 'a': 2, 'b': {'c': ()}} }}|{{ {1: 'i', 1.0: 'f', '1': 's'} }}|{{ {'k': 1}.k }}|\
    {{ [1, [2, (3,)]] }}|{{ range(3)[1] }}
{{ range(1000001) }}
{{ {[]: 1} }}
{{ 'tab\tnl\nq\'\x41\u00e9\101\q' }}|{{ "a\
b" }}|{{ 'x' 'y' }}|{{ "}}" }}|{{ '%}' }}|{{ {'a': {'b': 1}}['a']['b'] }}|{{ {'a': {'b': 2}} }}
{% raw %}{{ x }} {% y %}{% endraw %}|{# a comment {{ x }} #}|{#- and -#} |{{- ' a ' -}} | {{ '{{' }}
  {% if t %}
    indented
  {% endif %}
  {%+ if t %}kept{% endif +%}
end {{ n }}
{%- for x in l -%}
   {{ x }}
{%- endfor %}

last
{{ s|upper|lower|length }}|{{ l|length > 2 }}|{{ (l|length) - 1 }}|{{ 'a' ~ 'b'|upper }}|{{ not l is string }}|\
    {{ l[n - 7:n - 5] }}|{{ l|join('|')|string|length + 1 }}|{{ (s ~ '!')[-1] }}|{{ m[0].role.upper()[0] }}|\
    {{ m[-1]['x'].y }}
{{ m|tojson|safe }}|{{ '<b>' }}|{{ s|length }}|{{ u|length }}|{{ 'a'|attr('upper') is callable }}|\
    {{ d|attr('b') is defined }}
{% set x = {'a': 1} %}{% set x = dict(x, b=2) %}{{ x }}|{{ dict(x, **{'c': 3}) }}|{{ range(*[1, 3])|list }}
{{ -l|length }}
{{ n.bogus() }}
{{ s.bogus() }}
{{ bogus(1) }}
{{ s|bogus }}
{{ s is bogus }}
{% bogus %}
{% if %}
{% for x in l %}
{{ 'open
{{ a b }}
{% endif %}
""")

# Some have several lines.
LINES = {"{% raw %}": 4, '{{ \'tab\\tnl': 2, "  {% if t %}": 10}

CONVERSATION = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "How hot is <kiln> 2?"},
]
TOOLS = [{"type": "function", "function": {
    "name": "kiln", "description": "The heat of a kiln's \"floor\"",
    "parameters": {
        "type": "object", "properties": {"number": {"type": "integer", "enum": [1, 2]}}, "required": ["number"],
    },
}}]
CALL = {"role": "assistant", "content": "", "reasoning_content": "\nAsk the kiln.\n", "tool_calls": [
    {"id": "abcdefgh1", "type": "function", "function": {"name": "kiln", "arguments": {"number": 2, "unit": "°C"}}},
]}
RESULT = {"role": "tool", "name": "kiln", "tool_call_id": "abcdefgh1", "content": "{\"heat\": 1260.0}"}

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = {
    "system": {"messages": CONVERSATION, "tools": None, "documents": None, "add_generation_prompt": True, **TOKENS},
    "turns": {
        "messages": [CONVERSATION[1], {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHot. "},
                     {"role": "user", "content": "How hot?"}, {"role": "assistant", "content": "1260"}],
        "tools": None, "documents": None, "add_generation_prompt": False, **TOKENS,
    },
    "tools": {"messages": [*CONVERSATION, CALL, RESULT], "tools": TOOLS, "documents": None,
              "add_generation_prompt": True, "enable_thinking": False, **TOKENS},
    "refused": {"messages": [CONVERSATION[1], {"role": "user", "content": "Well?"}], "tools": None, "documents": None,
                "add_generation_prompt": True, **TOKENS},
}

FAMILIES = {
    "llama3": joined(r"""{{- bos_token }}
{%- if not date_string is defined %}\
    {% set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}{% endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set intro = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set intro = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" + intro + "<|eot_id|>" }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>"}}
{%- endif %}
{%- for turn in messages %}
    {%- if not (turn.role == 'ipython' or turn.role == 'tool' or 'tool_calls' in turn) %}
        {{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\n\n'+ turn['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in turn %}
        {%- if not turn.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = turn.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- elif turn.role == "tool" or turn.role == "ipython" %}
        {%- if turn.content is mapping or turn.content is iterable and turn.content is not string %}
            {{- turn.content | tojson }}
        {%- else %}
            {{- turn.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""),
    "qwen": joined(r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set state = namespace(unasked=true, asked_at=messages|length - 1) %}
{%- for turn in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if state.unasked and turn.role == "user" and turn.content is string \
        and not(turn.content.startswith('<tool_response>') and turn.content.endswith('</tool_response>')) %}
        {%- set state.unasked = false %}
        {%- set state.asked_at = index %}
    {%- endif %}
{%- endfor %}
{%- for turn in messages %}
    {%- set content = turn.content if turn.content is string else '' %}
    {%- if (turn.role == "user") or (turn.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + turn.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif turn.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if turn.reasoning_content is string %}
            {%- set reasoning_content = turn.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > state.asked_at and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + turn.role + '\n<think>\n' + reasoning_content.strip('\n') \
                + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + turn.role + '\n' + content }}
        {%- endif %}
        {%- for call in turn.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
            {%- if call.function %}
                {%- set call = call.function %}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif turn.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' ~ content ~ '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""),
    "mistral": r"""{%- if messages[0]["role"] == "system" %}
    {%- set intro = messages[0]["content"] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set asked = turns | selectattr("role", "equalto", "user") | list %}
{%- set state = namespace(index=0) %}
{%- for turn in turns %}
    {%- if not (turn.role == "tool" or (turn.tool_calls is defined and turn.tool_calls is not none)) %}
        {%- if (turn["role"] == "user") != (state.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user/assistant") }}
        {%- endif %}
        {%- set state.index = state.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn["role"] == "user" %}
        {%- if tools is not none and (turn == asked[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and intro is defined %}
            {{- "[INST] " + intro + "\n\n" + turn["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + turn["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif turn.tool_calls is defined and turn.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in turn.tool_calls %}
            {%- set out = call.function|tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id|length != 9 %}
                {{- raise_exception("ids have nine letters") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif turn["role"] == "assistant" %}
        {{- " " + turn["content"]|trim + eos_token}}
    {%- elif turn["role"] == "tool" %}
        {%- if turn.content is defined and turn.content.content is defined %}
            {%- set content = turn.content.content %}
        {%- else %}
            {%- set content = turn.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ", " }}
        {{- '"call_id": "' + turn.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("unknown role") }}
    {%- endif %}
{%- endfor %}
""",
    "gemma": r"""{{ bos_token }}
{%- set state = namespace(prefix='', turns=messages) -%}
{%- if messages[0].role == 'system' -%}
    {%- set state.prefix = messages[0].content ~ '

' -%}
    {%- set state.turns = messages[1:] -%}
{%- endif -%}
{%- for turn in state.turns -%}
    {%- if (turn['role'] == 'user') != (loop.index0 is even) -%}
        {{ raise_exception("users and models take turns") }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '
' + (state.prefix if loop.first else '') }}
    {%- if turn['content'] is string -%}
        {{ turn['content'] | trim }}
    {%- else -%}
        {{ turn.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | map('trim') | join }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{{ '<start_of_turn>model
' if add_generation_prompt }}""",
    "phi": joined(r"""{% for turn in messages %}{{ '<|' ~ turn['role'] ~ '|>' }}\
    {% if turn.role == 'system' and tools %}{{ turn['content'] + '<|tool|>' + (tools | tojson) + '<|/tool|>' }}\
    {% else %}{{ turn['content'] }}{% endif %}{{ '<|end|>' }}{% endfor %}\
    {{ '<|assistant|>' if add_generation_prompt else eos_token }}"""),
    "chatml": joined(r"""{% set begin = '<|im_start|>' %}\
    {% for turn in messages if turn.content is string %}{{ begin + turn['role'] + '
' + turn['content'] + '<|im_end|>' + '
' }}{% endfor %}{{ begin ~ 'assistant
' if add_generation_prompt }}"""),
    "zephyr": """{% set tags = {'user': '<|user|>', 'system': '<|system|>', 'assistant': '<|assistant|>'} %}
{% for turn in messages %}
{% if turn['role'] in tags %}
{{ tags[turn['role']] + '\n' + turn['content'] + eos_token }}
{% endif %}
  {% if loop.last and add_generation_prompt %}
{{ tags.assistant }}
  {% endif %}
{% endfor %}
""".replace("\n", "\r\n"),
    "deepseek": joined(r"""{% if not add_generation_prompt is defined %}\
    {% set add_generation_prompt = false %}{% endif %}
{%- set state = namespace(calls=0, results=0, intro='') -%}
{%- macro spelled(call) -%}\
    {{ call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\n```json\n' \
    + call['function']['arguments']|tojson + '\n```' }}{%- endmacro -%}
{%- for turn in messages if turn['role'] == 'system' %}{% set state.intro = turn['content'] %}{% endfor -%}
{{bos_token}}{{state.intro}}
{%- for turn in messages -%}
{%- if turn['role'] == 'user' -%}{{'<｜User｜>' + turn['content']}}
{%- elif turn['role'] == 'assistant' and turn['tool_calls'] -%}
{{'<｜Assistant｜><｜tool▁calls▁begin｜>'}}\
    {%- for call in turn['tool_calls'] -%}{%- if state.calls -%}{{'\n'}}{%- endif -%}\
    {{ spelled(call) }}{%- set state.calls = state.calls + 1 -%}{%- endfor -%}{{'<｜tool▁calls▁end｜>'}}
{%- elif turn['role'] == 'assistant' -%}
{{'<｜Assistant｜>' + (turn.content.split('</think>')|last).lstrip() + '<｜end▁of▁sentence｜>'}}
{%- elif turn['role'] == 'tool' -%}\
    {{'<｜tool▁outputs▁begin｜>' if state.results == 0 else '\n'}}{{ turn['content'] }}\
    {%- set state.results = state.results + 1 -%}{%- endif -%}
{%- endfor -%}
{% if state.results > 0 %}{{'<｜tool▁outputs▁end｜>'}}\
    {% elif add_generation_prompt %}{{'<｜Assistant｜><think>\n'}}{% endif %}"""),
    "granite": joined(r"""{%- if messages[0]['role'] == 'system' %}
     {%- set intro = messages[0]['content'] %}
     {%- set turns = messages[1:] %}
{%- else %}
     {%- set intro = "Today's Date: " + strftime_now('%B %d, %Y') + ".\nYou are Granite." %}
     {%- if tools and documents %}
         {%- set intro = intro + " Use tools and documents." %}
     {%- elif tools %}
         {%- set intro = intro + " Use tools." %}
     {%- endif %}
     {%- set turns = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + intro + '<|end_of_text|>
' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' }}
    {{- tools | tojson(indent=4) }}
    {{- '<|end_of_text|>
' }}
{%- endif %}
{%- for turn in turns %}
    {{- '<|start_of_role|>' + turn['role'] + '<|end_of_role|>' + turn['content'] }}
    {%- for call in turn.get('tool_calls', []) %}
        {{- '<|tool_call|>' \
            ~ {'name': call.function.name, 'arguments': call.function.arguments}|tojson(separators=(',', ':')) }}
    {%- endfor %}
    {{- '<|end_of_text|>
' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
            {%- if controls %}
                {{- ' ' + controls | tojson()}}
            {%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""),
    "smollm": r"""{# ───── defaults ───── #}
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
  {%- set intro = messages[0].content -%}
  {%- if "/no_think" in intro -%}{%- set mode = "/no_think" -%}{%- endif -%}
  {%- set custom = intro.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\n## Metadata\n\nDate: " ~ strftime_now("%d %B %Y") ~ "\nReasoning Mode: " + mode + "\n\n" -}}
{%- if custom -%}{{- custom + "\n\n" -}}{%- endif -%}
{%- if tools -%}
  {%- set state = namespace(listed="<tools>\n") -%}
  {%- for tool in tools[:] -%}
    {%- set state.listed = state.listed ~ (tool | string) ~ "\n" -%}
  {%- endfor -%}
  {{- "### Tools\n" + state.listed + "</tools>" + "\n\n" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for turn in messages -%}
    {%- set content = turn.content if turn.content is string else "" -%}
    {%- if turn.role == "user" -%}
        {{ "<|im_start|>" + turn.role + "\n"  + content + "<|im_end|>\n" }}
    {%- elif turn.role == "assistant" -%}
        {%- generation -%}
        {%- if mode == "/think" -%}
            {{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}
            {{ "<|im_start|>assistant\n" + "<think>\n\n</think>\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- endif -%}
        {%- endgeneration -%}
    {%- elif turn.role == "tool" -%}
    {{ "<|im_start|>" + "user\n"  + content + "<|im_end|>\n" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\n" ~ ("" if mode == "/think" else "<think>\n\n</think>\n") }}
{%- endif -%}""",
}

REFUSED = [
    ["{{ m|map('upper') }}", "generator"],
    ["{{ 10 ** 40 }}", "more digits"],
    ["{{ 'a'|escape }}", "escape"],
    ["{{ ('<'|safe) + '<' }}", "safe"],
    ["{{ 'straße'.casefold() }}", "casefold"],
    ["{% block b %}x{% endblock %}", "block"],
    ["{% autoescape true %}{{ '<' }}{% endautoescape %}", "autoescape"],
    ["{% macro f() %}{{ varargs }}{% endmacro %}{{ f(1, 2) }}", "varargs"],
    ["{% set a = 1 %}{% with a = 2, b = a %}{{ b }}{% endwith %}", "with"],
    ["{{ joiner(',') is callable }}", "joiner"],
    ["{{ lipsum() }}", "lipsum"],
    ["{{ '%*d' % (3, 5) }}", "width"],
    ["{{ '{:{}}'.format('a', 3) }}", "format"],
    ["{{ 'a b'|urlencode }}", "urlencode"],
    ["{{ '٣'.isdigit() }}", "digits beyond ASCII"],
    ["{{ namespace(a=1) }}", "object"],
    ["{{ [namespace(a=1)]|length }}", "namespace"],
    ["{% set ns = namespace(x=1) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}", "nest so deep"],
    ["{{ 'a'.upper }}", "object"],
    ["{{ 7 .bit_length() }}", "bit_length"],
    ["{{ '\\N{SNOWMAN}' }}", "by name"],
    ["{% set größe = 1 %}{{ größe }}", "größe"],
]


def snippets():
    lines = SNIPPETS.strip("\n").split("\n")
    while lines:
        count = next(
            (count for start, count in LINES.items() if lines[0].startswith(start) and "endraw" not in lines[0]), 1
        )
        yield "\n".join(lines[:count])
        lines = lines[count:]


CRLF = [
    "a\r\n{% if t %}\r\n  b\r\n{% endif %}\r\nc{{ 'x\r\ny'|length }}\r\n",
    "a\r{% for x in l %}\r{{ x }}\r{% endfor %}\rb\n\n",
    "{{ u }}\r\n{#\r\n#}\r\nx",
]

golden = {
    "now": NOW,
    "context": DATA,
    "snippets": [[template, rendered(template, DATA)] for template in [*snippets(), *CRLF]],
    "refused": REFUSED,
    "families": FAMILIES,
    "conversations": CONVERSATIONS,
    "samples": {
        family: {name: rendered(template, context) for name, context in CONVERSATIONS.items()}
        for family, template in FAMILIES.items()
    },
}
assert all(isinstance(rendered(template, DATA), str) for template, _ in REFUSED if "lipsum" not in template)
OUT.write_text(json.dumps(golden, ensure_ascii=False, indent=0) + "\n")
