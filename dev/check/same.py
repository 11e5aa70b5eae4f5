"""Readers and the comparison of same.sh, which describes the parts.

Each reader prints lines KEY<TAB>VALUE. `compare` treats both sides as multisets of such lines; in
`functions` and `object` only values count, and a key is only a name for display.
"""
import collections
import hashlib
import json
import pathlib
import random
import re
import struct
import subprocess
import sys

TOKEN = re.compile(r'//(?:\\\n|[^\n])*|/\*.*?\*/|^[ \t]*#(?:\\\n|/\*.*?\*/|[^\n])*|'
                   r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|[A-Za-z_]\w*|'
                   r'\.?\d(?:[eEpP][+-]|[\w.])*|\S', re.S | re.M)


def sha(text):
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()[:24]


def tokens(text):
    """Tokens without comments; a directive is one token. Adjacent strings become one."""
    joined = []
    for t in TOKEN.findall(text):
        if t.startswith(('//', '/*')):
            continue
        if t.lstrip().startswith('#'):
            t = '# ' + ' '.join(tokens(t.replace('\\\n', ' ').lstrip()[1:]))
        if t[0] == '"' and joined and joined[-1][0] == '"':
            t = joined.pop()[:-1] + t[1:]
        joined.append(t)
    return joined


def items(source):
    """Top-level definitions, each preceded by its conditions (#if)."""
    item, head, context, depth, conditions = [], [], '', 0, []
    for t in tokens(source):
        if t.startswith('# '):
            word, _, rest = t[2:].partition(' ')
            if word in ('if', 'ifdef', 'ifndef'):
                conditions.append([f'{word} {rest}', depth])
            elif word in ('else', 'elif'):    # brackets are counted in one branch
                conditions[-1][0] += f' {word} {rest}'
                depth = conditions[-1][1]
            elif word == 'endif':
                conditions.pop()
            if item:
                item.append(t)
            elif word in ('define', 'undef', 'pragma') and rest != 'once' and '_H' not in t[-3:]:
                yield ' '.join(f'[{c}]' for c, _ in conditions), t
            continue
        if not item:
            context = ' '.join(f'[{c}]' for c, _ in conditions if not c.endswith(('_H', '_H_')))
        item.append(t)
        depth += (t in '({[') - (t in ')}]')
        if t == '{' and depth == 1 or '{' not in item:
            head = item[:]    # up to the last { at top level; a parameter may have a default
        function = head[0] not in ('typedef', 'enum') and \
            (head[-2:] != ['=', '{'] and '(' in head or 'operator' in head)
        ends = depth <= 0 and (t == ';' or t == '}' and (item == ['}'] or function))
        if head[0] in ('extern', 'namespace') and t == '{' and '(' not in head:
            item, depth = [], 0    # its contents are at top level, its last } is dropped
        elif ends:
            prototype = item[-2:] == [')', ';'] and '{' not in item and '=' not in item and \
                head[0] not in ('typedef', 'static_assert', '_Static_assert')
            forward = len(item) == 3 and item[0] in ('struct', 'enum', 'class', 'union')
            if len(item) > 1 and not prototype and not forward:
                yield context, ' '.join(item)
            item, depth = [], 0


def print_items():
    for path in sys.stdin.read().split('\n'):
        if path and pathlib.Path(path).exists():
            for context, text in items(pathlib.Path(path).read_text()):
                name = re.sub(r' ?[({=;].*', '', text, flags=re.S) or text
                print(f'{path}: {name[:80]}\t{context} {text}')


def print_assembly(unit):
    """Definitions in gcc's assembly text: twice, without and with the contents of what they use."""
    bodies, aliases, name, literal = collections.OrderedDict(), {}, None, False
    for line in sys.stdin:
        label = re.match(r'([\w.$]+):', line)
        line = re.sub(r'\s+', ' ', line).strip()
        if label and (not label[1].startswith('.L') or label[1].startswith('.LC') and
                      label[1][3:].isdigit()):
            name = label[1]
            bodies[name] = []
        elif line.startswith('.set '):
            aliases.update([re.split(r'[ ,]+', line)[1:]])
        elif re.match(r'\.l?comm ', line):
            parts = re.split(r'[ ,]', line)
            bodies[parts[1]] = parts[:1] + parts[2:]
        elif re.match(r'\.size .*, ?\.-', line):
            name = None
        elif name and re.match(r'\.LC\d', name) and line.startswith(('.string', '.ascii')):
            bodies[name].append('STRING')
        elif name and not re.match(r'#|\.(cfi_|p2align|align|section|text|data|bss|type|size|globl|'
                                   r'local|weak|hidden|loc|file|ident|L(F|COLD|HOT)[BE])', line):
            bodies[name].append(line)
    for name, other in aliases.items():
        bodies.setdefault(name, bodies.get(other, [other]))

    def masked(name, replaced):
        seen = {}

        def change(m):
            word = m[0]
            if word in bodies:
                return replaced(word)
            return seen.setdefault(word, f'L{len(seen)}') if word.startswith('.L') else word
        return re.sub(r'(?<![%\w.$])[A-Za-z_.$][\w.$]*', change, '\n'.join(bodies[name]))

    alone, constant = {}, re.compile(r'\.LC\d')
    for name in bodies:
        alone[name] = sha(masked(name, lambda n: '\n'.join(bodies[n]) if constant.match(n)
                                 else 'SYM'))
    for name in bodies:
        if not constant.match(name):
            print(f'{unit}: {name}\t{alone[name]}')
    for name in bodies:
        if not constant.match(name):
            print(f'{unit}: {name}, with what it uses\t{sha(masked(name, alone.get))}')


def print_run(folder):
    """The log of a run, except times and paths, and each saved tensor."""
    folder = pathlib.Path(folder)
    unstable = ('options', 'device', 'ms', 'tokens_per_s', 'peak_pct', 'checkpoint')
    log = folder / 'log.jsonl'
    for line in log.read_text().splitlines() if log.exists() else []:
        row = {k: v for k, v in json.loads(line).items() if k not in unstable}
        key = f'{row.get("event", "step")} {row.pop("step", "")} {" ".join(list(row)[:1])}'
        print(f'{folder.name} {key}\t{json.dumps(row)}')
    for path in sorted(folder.glob('step-*/*')):
        data, name = path.read_bytes(), f'{folder.name} {path.parent.name}/{path.name}'
        if path.suffix == '.safetensors':
            size = struct.unpack('<Q', data[:8])[0]
            for tensor, t in json.loads(data[8:8 + size]).items():
                if tensor != '__metadata__':
                    begin, end = (8 + size + at for at in t['data_offsets'])
                    print(f'{name} {tensor}\t{t["dtype"]} {t["shape"]} {sha(data[begin:end])}')
        elif path.name != 'manifest.json':    # which contains hashes of whole files
            print(f'{name}\t{sha(data)}')


def draw_settings(count=300):
    """Settings from a fixed seed; some of them must be refused."""
    state = random.Random(22)

    def pick(*choices):
        return choices[int(state.random() * len(choices))]

    def some(text):
        return f' {text}' if state.random() < 0.3 else ''
    levels = ('none', 'gelu', 'norm', 'mlp', 'qkv', 'block')
    kinds = ('weights', 'gradients', 'moments', 'master', 'residuals')
    cards = ('t4', '4060ti', '4090', 'a100', 'h100', 'h200')
    for _ in range(count):
        model = pick('d12', 'd24', 'd36', 'd48', 'd12', 'l4h4c128t64', 'l3h5c320t100')
        level, gpu = pick(*levels), state.random() < 0.8
        line = f'-e {model} -b {pick(1, 2, 3, 4, 8, 16)}'
        line += some(f'-t {pick(1, 17, 50, 64)}') + some(f'--logit-rows {pick(128, 100, 1000)}')
        level = pick(level, level, f'{level}:{pick(1, 2, 7)}', f'{level}:2,{pick(*levels)}')
        kept = ','.join(k for k in kinds if state.random() < 0.5 and (gpu or k != 'master'))
        if state.random() < 0.05:
            line = f'-e {model} --gpu {pick(*cards)} --generate'
        elif gpu:
            line += some('--moments bf16') + some(f'-r {level}')
            line += f' --gpu {pick(*cards)}' if state.random() < 0.7 else \
                f' --gpu-mem {pick("4GiB", "20GiB", "100GiB")}'
            line += some(f'--dtype {pick("bf16", "fp16", "fp32")}') + some('--grad-dtype fp32')
            line += some(f'-w {pick("none", "split")}') + some(f'--workspace {pick(256, 1 << 20)}')
            line += some(f'--gpus {pick(2, 3, 8, 16)} -z {pick(0, 1, 2, 3)}')
            line += some(f'--offload {kept or "none"}')
        else:    # otherwise automatic levels would depend on free memory
            line += f' -r {level}' + some('--matmul bf16') + some(f'--offload {kept or "none"}')
        print(line)


def print_questions():
    state, body, longest = random.Random(5), b'', 0
    for i in range(6):
        texts = [[int(state.random() * 257) for _ in range(n)] for n in (6, 2, 3, 4, 3)]
        words = [65535, 0, i, i % 4, 4] + [w for text in texts for w in [len(text)] + text]
        words[1] = 2 * len(words)
        longest = max(longest, words[1])
        body += struct.pack(f'<{len(words)}H', *words)
    header = struct.pack('<256i', 20240522, 1, 6, longest, *[0] * 252)
    sys.stdout.buffer.write(header + body)


def print_help():
    text = re.sub(r'\n {12,}', ' ', sys.stdin.read())
    for letter, name, rest in re.findall(r'^  (?:-(\w),|   ) --([\w-]+)(.*)', text, re.M):
        stated = re.findall(r'\[[^]]*\](?= *$)|\(flag\)', rest)
        print(f'option {letter or "-"} {name} \t{" ".join(stated)}')


def print_kernels(arch, log):
    """Each kernel of a cubin: ptxas's figures and its code; the disassembly is read from stdin."""
    figures, bodies, name = {}, {}, None
    for line in open(log):
        if (entry := re.search(r"entry function '(\S+)'", line)):
            name = entry[1]
            figures[name] = []
        elif name and re.search(r'stack frame|Used \d+', line):
            figures[name].append(re.sub(r'ptxas info *:', '', line).strip())
    name = None
    for line in sys.stdin:
        if (section := re.match(r'\.(text|nv\.(?:constant|shared|global)[^.]*)\.(\S+):', line)):
            name = section[2]
        elif line.startswith('//---'):
            name = None
        elif name and not re.match(r'\s*\.(section|type|size|weak|global|align)|\s*$', line):
            bodies.setdefault(name, []).append(re.sub(r'/\*[0-9a-f]{4,}\*/', '', line).strip())
    plain = subprocess.run(['c++filt'], input='\n'.join(figures), text=True, check=True,
                           stdout=subprocess.PIPE).stdout.split('\n')
    for (mangled, used), text in zip(figures.items(), plain):
        seen = {}
        code = '\n'.join(bodies.get(mangled, [])).replace(mangled, 'SELF')
        code = re.sub(r'\.L_\w+|\$__internal_\d+|\$?_Z\w+',
                      lambda m: seen.setdefault(m[0], f'L{len(seen)}'), code)
        depth = end = 0
        for end, c in enumerate(text):    # up to the parameters
            depth += (c == '<') - (c == '>')
            if c == '(' and depth == 0:
                break
        print(f'{arch} {text[:end].replace("void ", "")}\t{", ".join(used)}; code {sha(code)}')


def compare(part, before, after, names):
    lines = [[line.rstrip('\n').partition('\t')[::2] for line in open(path)]
             if pathlib.Path(path).exists() else [] for path in (before, after)]
    renamed = dict(line.split()[:2] for line in open(names) if line.strip())
    if renamed and part in ('functions', 'sass', 'tests'):
        words = re.compile(r'\b(' + '|'.join(map(re.escape, renamed)) + r')\b')
        lines[0] = [tuple(words.sub(lambda m: renamed[m[0]], x) for x in row) for row in lines[0]]
    for side, other in ((0, 1), (1, 0)):
        if not lines[side] or lines[side][0][0] == 'skipped' and lines[side] != lines[other]:
            why = lines[side][0][1] if lines[side] else 'is empty'
            sys.exit(print(f'DIFFERS: {("the record", "this tree")[side]}: {why}') or 1)
    if lines[0][0][0] == 'skipped':
        return print(f'skipped ({lines[0][0][1]})')
    if part == 'instructions':
        then = dict(lines[0])
        lines[1] = [(k, then[k]) if k in then and (v + then[k]).isdigit() and
                    abs(int(v) - int(then[k])) <= int(then[k]) / 1000 else (k, v)
                    for k, v in lines[1]]
    by_value = part in ('functions', 'object')
    counts = [collections.Counter(v if by_value else (k, v) for k, v in side) for side in lines]
    gone, new = {}, {}
    for side, other, result in ((0, 1, gone), (1, 0, new)):
        surplus = counts[side] - counts[other]
        for k, v in lines[side]:
            if surplus[v if by_value else (k, v)] > 0:
                surplus[v if by_value else (k, v)] -= 1
                result.setdefault(k, []).append(v)
    if not gone and not new:
        return print(f'same ({len(lines[1])} lines)')
    print(f'DIFFERS: {sum(map(len, gone.values()))} recorded lines are gone, '
          f'{sum(map(len, new.values()))} are new')
    for key in list(dict.fromkeys([*gone, *new]))[:12]:
        if key in gone and key in new:
            a, b = gone[key][0].split(' '), new[key][0].split(' ')
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            a, b = (' '.join(x[max(at - 3, 0):at + 5])[:100] for x in (a, b))
            print(f'    {key}: {a} -> {b}')
        else:
            print(f'    {key}: {"gone" if key in gone else "new"}')
    sys.exit(1)


def print_numbers(key):
    print(f'{key}\t{" ".join(re.findall(r"[0-9][0-9.,:]*(?<![.,:])", sys.stdin.read()))}')


{'items': print_items, 'assembly': print_assembly, 'run': print_run, 'settings': draw_settings,
 'questions': print_questions, 'help': print_help, 'numbers': print_numbers,
 'kernels': print_kernels, 'compare': compare}[sys.argv[1]](*sys.argv[2:])
