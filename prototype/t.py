import ctypes, math, sys, torch, torch.nn.functional as F
lib=ctypes.CDLL(sys.argv[1] if len(sys.argv)>1 else "prototype/libatt3.so")
lib.attention_workspace.restype=ctypes.c_int64
class P(ctypes.Structure): _fields_=[("b",ctypes.c_int),("h",ctypes.c_int),("lq",ctypes.c_int),("lk",ctypes.c_int),("d",ctypes.c_int),("c",ctypes.c_int),("s",ctypes.c_float)]
class T(ctypes.Structure): _fields_=[("x",ctypes.c_void_p),("b",ctypes.c_int64),("h",ctypes.c_int64),("r",ctypes.c_int64)]
def t4(*xs): return (T*len(xs))(*[T(x.data_ptr(),x.stride(0),x.stride(1),x.stride(2)) for x in xs])
class B(ctypes.Structure): _fields_=[("x",ctypes.c_void_p),("b",ctypes.c_int64),("h",ctypes.c_int64),("r",ctypes.c_int64),("c",ctypes.c_int64),("g",ctypes.c_void_p)]
def bs(x,g=None):
    if x is None: return ctypes.byref(B(None,0,0,0,0,None))
    return ctypes.byref(B(x.data_ptr(),*x.stride(),g.data_ptr() if g is not None else None))
st=torch.cuda.current_stream().cuda_stream
VP=ctypes.c_void_p
def prob(q,k,causal): return P(q.shape[0],q.shape[1],q.shape[2],k.shape[2],q.shape[3],int(causal),1/math.sqrt(q.shape[3]))
def fwd(q,k,v,causal,bias=None,ws=None):
    p=prob(q,k,causal); o=torch.empty_like(q); stride=(q.shape[2]+31)//32*32
    lse=torch.empty(q.shape[0],q.shape[1],stride,device="cuda")
    if ws is None: ws=torch.empty(lib.attention_workspace(ctypes.byref(p),0),dtype=torch.uint8,device="cuda")
    r=lib.attention_forward(ctypes.byref(p),t4(q,k,v,o),VP(lse.data_ptr()),stride,bs(bias),VP(ws.data_ptr()),VP(st)); assert r==0,r
    return o,lse
def bwd(q,k,v,o,lse,g,causal,bias=None):
    p=prob(q,k,causal); dq,dk,dv=map(torch.empty_like,(q,k,v)); gb=None if bias is None else torch.full((q.shape[0],q.shape[1],q.shape[2],k.shape[2]),7.0,device='cuda')
    ws=torch.empty(lib.attention_workspace(ctypes.byref(p),1),dtype=torch.uint8,device="cuda")
    r=lib.attention_backward(ctypes.byref(p),t4(q,k,v,o,g,dq,dk,dv),VP(lse.data_ptr()),lse.shape[2],bs(bias,gb),VP(ws.data_ptr()),VP(st)); assert r==0,r
    return (dq,dk,dv) if gb is None else (dq,dk,dv,gb)
def exact(q,k,v,g,causal):
    q,k,v=[x.double().requires_grad_() for x in (q,k,v)]
    s=q@k.transpose(-1,-2)/math.sqrt(q.shape[3])
    if causal: s=s.masked_fill(torch.ones(s.shape[-2:],dtype=torch.bool,device="cuda").triu(1),-math.inf)
    lse=s.logsumexp(-1); o=s.softmax(-1)@v
    return (o.detach(),lse.detach())+torch.autograd.grad(o,(q,k,v),g.double())
def exactb(q,k,v,g,bias,causal):
    q,k,v=[x.double().requires_grad_() for x in (q,k,v)]
    b=bias.double().expand(q.shape[0],q.shape[1],q.shape[2],k.shape[2]).clone().requires_grad_()
    s=q@k.transpose(-1,-2)/math.sqrt(q.shape[3])+b
    if causal: s=s.masked_fill(torch.ones(s.shape[-2:],dtype=torch.bool,device="cuda").triu(1),-math.inf)
    lse=s.logsumexp(-1); o=s.softmax(-1)@v
    return (o.detach(),lse.detach())+torch.autograd.grad(o,(q,k,v,b),g.double())
def checkb(name,b,h,lq,lk,d,causal,shape,mask=False):
    torch.manual_seed(0)
    q,k,v,g=[torch.randn(b,h,l,d,device="cuda") for l in (lq,lk,lk,lq)]
    bias=torch.randn(*shape,device="cuda")
    if mask: bias=torch.zeros_like(bias).masked_fill(bias>0.5,-math.inf); bias[...,0]=0
    bias=bias.expand(b,h,lq,lk)
    e=exactb(q,k,v,g,bias,causal); torch.cuda.synchronize()
    o,lse=fwd(q,k,v,causal,bias); ours=(o,lse[...,:lq])+bwd(q,k,v,o,lse,g,causal,bias); torch.cuda.synchronize()
    print(f"bias {name:12}",(b,h,lq,lk,d,causal),"o lse dq dk dv dbias",*[f"{rel(x,y):.1e}" for x,y in zip(ours,e)],flush=True)
def speedb(b,h,l,d):
    q,k,v,g=[torch.randn(b,h,l,d,device="cuda") for _ in range(4)]
    bias=torch.randn(1,h,l,l,device="cuda").expand(b,h,l,l)
    o,lse=fwd(q,k,v,False,bias)
    a=time(lambda:fwd(q,k,v,False,bias)); c=time(lambda:bwd(q,k,v,o,lse,g,False,bias))
    qq,kk,vv=[x.detach().requires_grad_() for x in (q,k,v)]; bb=bias.detach()[:1].clone().requires_grad_()
    ta=time(lambda:F.scaled_dot_product_attention(q,k,v,bias))
    oo=F.scaled_dot_product_attention(qq,kk,vv,bb.expand(b,h,l,l))
    tc=time(lambda:torch.autograd.grad(oo,(qq,kk,vv,bb),g,retain_graph=True))
    print("bias",(b,h,l,d),f"fwd {a:.3f} bwd {c:.3f} torch {ta:.3f} {tc:.3f}",flush=True)
def rel(a,b): return ((a.double()-b).norm()/b.norm()).item()
def mx(a,b): return ((a.double()-b).abs().max()/b.abs().max()).item()
def torchs(q,k,v,g,causal):
    q,k,v=[x.detach().requires_grad_() for x in (q,k,v)]
    o,lse,_,_=torch.ops.aten._scaled_dot_product_efficient_attention(q,k,v,None,True,0.0,causal)
    return (o.detach(),lse.detach()[...,:q.shape[2]])+torch.autograd.grad(o,(q,k,v),g)
def check(name,b,h,lq,lk,d,causal,f=lambda x,i:x,layout=None):
    torch.manual_seed(0)
    if layout=="blhd": xs=[f(torch.randn(b,l,h,d,device="cuda"),i).transpose(1,2) for i,l in enumerate((lq,lk,lk,lq))]
    else: xs=[f(torch.randn(b,h,l,d,device="cuda"),i) for i,l in enumerate((lq,lk,lk,lq))]
    q,k,v,g=xs
    o,lse=fwd(q,k,v,causal)
    e=exact(q,k,v,g,causal); t=torchs(q,k,v,g,causal)
    torch.cuda.synchronize()
    ours=(o,lse[...,:lq])+bwd(q,k,v,o,lse,g,causal)
    again=(fwd(q,k,v,causal)[0],lse[...,:lq])+bwd(q,k,v,o,lse,g,causal)
    torch.cuda.synchronize()
    same=all(torch.equal(x,y) for x,y in zip(ours,again))
    print(f"{name:22}",(b,h,lq,lk,d,causal),"ours",*[f"{rel(x,y):.1e}" for x,y in zip(ours,e)],"torch",*[f"{rel(x,y):.1e}" for x,y in zip(t,e)],"| max",*[f"{mx(x,y):.0e}" for x,y in zip(ours,e)],"torch",*[f"{mx(x,y):.0e}" for x,y in zip(t,e)],"same" if same else "DIFFERENT",flush=True)
def time(f,n=20):
    for _ in range(3): f()
    ev=[(torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)) for _ in range(n)]
    for a,b in ev: a.record(); f(); b.record()
    torch.cuda.synchronize(); return sorted(a.elapsed_time(b) for a,b in ev)[n//2]
def speed(b,h,l,d,causal):
    q,k,v,g=[torch.randn(b,h,l,d,device="cuda") for _ in range(4)]
    o,lse=fwd(q,k,v,causal)
    n=20 if l<4096 else 7
    a=time(lambda:fwd(q,k,v,causal),n); c=time(lambda:bwd(q,k,v,o,lse,g,causal),n)
    qq,kk,vv=[x.detach().requires_grad_() for x in (q,k,v)]
    ta=time(lambda:F.scaled_dot_product_attention(q,k,v,is_causal=causal),n)
    oo=F.scaled_dot_product_attention(qq,kk,vv,is_causal=causal)
    tc=time(lambda:torch.autograd.grad(oo,(qq,kk,vv),g,retain_graph=True),n)
    fl=4*b*h*l*l*d/1e9*(0.5 if causal else 1)
    print((b,h,l,d,causal),f"fwd {a:.3f} ms {fl/a:.0f} TF, bwd {c:.3f} ms {2.5*fl/c:.0f} TF; torch {ta:.3f} {tc:.3f}",flush=True)
if __name__=="__main__":
    print(torch.cuda.get_device_name())
    check("small",1,1,128,128,64,False)
    check("",2,3,512,512,64,False); check("",2,3,512,512,64,True)
    check("",2,2,300,170,64,False); check("",2,2,300,170,64,True); check("",2,2,170,300,64,True)
    check("",2,2,300,170,32,False); check("",2,2,170,300,8,True)
    check("",2,3,512,512,128,False); check("",2,3,512,512,128,True)
    check("",2,2,300,170,128,False); check("",2,2,300,170,128,True); check("",2,2,170,300,96,True)
    check("blhd",2,2,300,170,64,True,layout="blhd")
    check("long",1,2,4096,4096,64,False); check("long",1,2,4096,4096,128,True)
    def rows(x,i): return x*torch.exp(1.5*torch.randn(*x.shape[:-1],1,device="cuda"))
    check("row norms",1,4,512,512,64,False,rows)
    def out(x,i):
        if i==3: return x
        m=torch.rand_like(x)<0.001; return torch.where(m,x*(1e4 if i==2 else 30),x*(1e-4 if i==2 else 1))
    check("outliers",1,4,512,512,64,False,out)
    check("big scores",1,4,512,512,64,False,lambda x,i:x*(10 if i<2 else 1))
    check("tiny",1,4,512,512,64,False,lambda x,i:x*1e-12)
    check("huge",1,4,512,512,64,False,lambda x,i:x*(1e-12 if i==0 else 1e12))
    checkb("full",2,2,300,170,64,False,(2,2,300,170)); checkb("causal",2,2,300,170,64,True,(2,2,300,170))
    checkb("row",2,2,300,170,128,False,(2,1,1,170)); checkb("mask",2,2,170,300,128,True,(1,2,170,300),True)
    q,k,v=[torch.randn(1,1,70,64,device="cuda") for _ in range(3)]; m=torch.zeros(1,1,70,70,device="cuda"); m[...,5,:]=-math.inf
    o,lse=fwd(q,k,v,False,m); r=bwd(q,k,v,o,lse,v,False,m); t=torch.ops.aten._scaled_dot_product_efficient_attention(q,k,v,torch.zeros(1,1,70,72,device="cuda")[...,:70].copy_(m),True,0.0,False)
    print("masked row",o[0,0,5,:3].tolist(),lse[0,0,5].item(),[x.isfinite().all().item() for x in r],"torch",t[0][0,0,5,:3].tolist(),t[1][0,0,5].item(),t[1].shape)
    speedb(16,12,512,64); speedb(4,16,1024,64); speedb(1,16,4096,128)
    for c in (False,True):
        speed(16,12,512,64,c); speed(4,16,1024,64,c); speed(4,16,4096,64,c); speed(4,16,4096,128,c)
    import torch.profiler as tp
    q,k,v,g=[torch.randn(4,16,4096,128,device="cuda") for _ in range(4)]
    q2,k2,v2,g2=[torch.randn(16,12,512,64,device="cuda") for _ in range(4)]
    with tp.profile(activities=[tp.ProfilerActivity.CUDA]) as pr:
        for a in ((q,k,v,g),(q2,k2,v2,g2)):
            for _ in range(2):
                o,lse=fwd(*a[:3],False); bwd(*a[:3],o,lse,a[3],False)
        torch.cuda.synchronize()
    for e in pr.events():
        if e.device_time>0 and "kernel" in e.name: print(e.name[:110], f"{e.device_time:.1f}")
