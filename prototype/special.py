import sys; 
exec(open("prototype/t.py").read().split('if __name__')[0])
inf=float("inf"); nan=float("nan")
def kinds(o): return (int(o.isnan().sum()),int((o==inf).sum()),int((o==-inf).sum()))
for name,which,val in (("q inf",0,inf),("k inf",1,inf),("k -inf",1,-inf),("v inf",2,inf),("q nan",0,nan),("k nan",1,nan),("v nan",2,nan)):
  for c in (False,True):
    torch.manual_seed(0)
    xs=[torch.randn(1,1,256,64,device="cuda") for _ in range(4)]
    xs[which][0,0,200,5]=val
    q,k,v,g=xs
    o,lse=fwd(q,k,v,c); t=torchs(q,k,v,g,c); r=bwd(q,k,v,o,lse,g,c)
    both=o.isfinite()&t[0].isfinite()
    print(name,c,"ours o lse dq dk dv",[kinds(x) for x in (o,lse,*r)],"torch",[kinds(x) for x in t],"same finite set",(o.isfinite()==t[0].isfinite()).all().item(), "diff",(o-t[0])[both].abs().max().item() if both.any() else None)
# subnormal, zero data
q=torch.zeros(1,1,200,64,device="cuda"); o,lse=fwd(q,q,q,False); print("zeros",o.abs().max().item(),lse[0,0,:3].tolist(),lse[0,0,200:].tolist()[:2])
q=torch.randn(1,1,200,64,device="cuda")*1e-40; v=torch.randn_like(q); o,lse=fwd(q,q,v,False); print("subnormal",(o-v.mean(2,keepdim=True)).abs().max().item())
v2=v*torch.logspace(-10,10,64,device="cuda"); q=torch.randn_like(v); o,_=fwd(q,q,v2,False); e=exact(q,q,v2,v2,False)[0]; print("column errors",[f"{rel(o[...,i],e[...,i]):.0e}" for i in range(0,64,4)])
t=torchs(q,q,v2,v2,False)[0]; print("torch",[f"{rel(t[...,i],e[...,i]):.0e}" for i in range(0,64,4)])
