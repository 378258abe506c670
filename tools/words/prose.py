"""prose.py REGEX: concordance of prose (docstrings, comments, strings with blanks, md, yaml comments), 100 chars wide."""
import re,subprocess,sys,tokenize,io
pat=re.compile(sys.argv[1]); only=sys.argv[2] if len(sys.argv)>2 else ''
root='.'
def emit(f,n,text):
    for m in pat.finditer(text):
        a=max(0,m.start()-60); b=m.end()+50
        print(f"{f.replace('fl_lightning/','fl/')}:{n}: {' '.join(text[a:b].split())}")
for f in subprocess.check_output(['git','ls-files'],text=True).split():
    if f.startswith(('studies/results','benchmarks/results')) or only and not re.search(only,f): continue
    if f.endswith(('.py','.pyi')):
        src=open(f).read()
        for t in tokenize.generate_tokens(io.StringIO(src).readline):
            if t.type==tokenize.COMMENT or t.type==tokenize.STRING and re.search(r'\s',t.string):
                emit(f,t.start[0],t.string)
    elif re.search(r'\.(md|yaml|toml|ipynb|html|txt)$|Makefile$',f) and 'lock' not in f:
        for n,l in enumerate(open(f),1): emit(f,n,l)
