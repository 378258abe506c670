"""names.py REGEX [-l]: NAME tokens that match, per file counts, or lines."""
import re,subprocess,sys,tokenize,io,collections
pat=re.compile(sys.argv[1]); lines='-l' in sys.argv
root=sys.argv[sys.argv.index('-C')+1] if '-C' in sys.argv else '.'
fs=[f for f in subprocess.check_output(['git','-C',root,'ls-files'],text=True).split() if re.search(r'\.pyi?$',f)]
tot=collections.Counter()
for f in fs:
    src=open(f'{root}/{f}').read()
    hit=collections.Counter(); out=[]
    for t in tokenize.generate_tokens(io.StringIO(src).readline):
        if t.type==tokenize.NAME and pat.fullmatch(t.string):
            hit[t.string]+=1; tot[t.string]+=1; out.append((t.start[0],t.line.rstrip()))
    if hit:
        if lines:
            seen=set()
            for n,l in out:
                if n not in seen: print(f'{f}:{n}:{l}'); seen.add(n)
        else: print(f, dict(hit))
print(sum(tot.values()), tot.most_common(60))
