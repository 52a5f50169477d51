"""Cells that the tests define with my_ops.cell, in a module, so that they can be pickled."""

import torch
import torch.nn.functional as F

import my_ops


@my_ops.cell(gates="i f g o", carried="c")
def lstm(i, f, g, o, c):
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    c = f * c + i * g
    return o * torch.tanh(c), c


@my_ops.cell(gates="r u n")
def gru(r, u, n_x, n_h, h):
    r, u = torch.sigmoid(r), torch.sigmoid(u)
    n = torch.tanh(n_x + r * n_h)
    return n + u * (h - n)


@my_ops.cell(gates="i o g", carried="c")
def lltm(i, o, g, c):
    c = c + F.elu(g) * torch.sigmoid(i)
    return torch.tanh(c) * torch.sigmoid(o), c


@my_ops.cell(gates="a")
def tanh_rnn(a):
    return torch.tanh(a)


@my_ops.cell(gates="a")
def relu_rnn(a):
    return torch.relu(a)


@my_ops.cell(gates="f g")
def minimal(f, g_x, g_h, h):
    """The minimal gated unit (Zhou et al., 2016), with the reset after the product."""
    f = f.sigmoid()
    return (1 - f) * h + f * torch.tanh(g_x + f * g_h)


@my_ops.cell(gates="i f g o", carried="c", parameters="p_i p_f p_o")
def peephole(i, f, g, o, c, p_i, p_f, p_o):
    """LSTM whose gates see the cell (Gers and Schmidhuber, 2000)."""
    i, f = torch.sigmoid(i + p_i * c), torch.sigmoid(f + p_f * c)
    c = f * c + i * torch.tanh(g)
    return torch.sigmoid(o + p_o * c) * torch.tanh(c), c


@my_ops.cell(gates="f g", parameters="p")
def scaled(f, g_x, g_h, h, p):
    """A gate whose shares are apart beside a parameter of each unit."""
    f = torch.sigmoid(f + p * h)
    return (1 - f) * h + f * torch.tanh(g_x + p * g_h)


@my_ops.cell(gates="a", parameters="u")
def indrnn(a, h, u):
    """A unit's own weight of h, as in IndRNN (Li et al., 2018), beside those of all units."""
    return torch.relu(a + u * h)


@my_ops.cell(gates="a b", carried="c", parameters="p")
def functions(a, b, c, p):
    """All functions of the kernels beside the gates'."""
    a = F.softplus(a + p)
    c = torch.sqrt(0.5 + c * c) * torch.exp(-a) + torch.log1p(a)
    return torch.expm1(-b * b) * torch.log(0.5 + c), c


@my_ops.cell(gates="i f z o", carried="c n m")
def slstm(i, f, z, o, c, n, m):
    """sLSTM (Beck et al., 2024): exponential gates, kept in range by the largest exponent, m."""
    f = F.logsigmoid(f) + m
    m = torch.maximum(f, i)
    i, f = torch.exp(i - m), torch.exp(f - m)
    c = f * c + i * torch.tanh(z)
    n = f * n + i
    return torch.sigmoid(o) * c / n, c, n, m


@my_ops.cell(gates="f g", carried="c")
def janet(f, g, c, beta=1.0):
    """JANET (van der Westhuizen and Lasenby, 2018): h is c."""
    c = torch.sigmoid(f) * c + (1 - torch.sigmoid(f - beta)) * torch.tanh(g)
    return c, c


@my_ops.cell(gates="f", carried="c")
def crossed(f, h, c):
    """What is carried reads h, and shares a value with the new h."""
    f = torch.relu(f)
    return torch.tanh((f + h) * c), torch.tanh(f + c - h)


@my_ops.cell(gates="f g", carried="c slow")
def two_speeds(f, g, c, slow, h):
    """Two carried values and h, without functions that the kernels lack."""
    f = torch.sigmoid(f)
    c = f * c + (1 - f) * torch.tanh(g)
    slow = slow + 0.125 * (1 - f) * (c - slow)
    return 0.5 * (f * h + (1 - f) * torch.tanh(c - slow)), c, slow


MADE = (lstm, gru, lltm, tanh_rnn, relu_rnn, minimal, peephole, scaled, indrnn, functions, slstm)
ALL = {made.name: made for made in (*MADE, janet, crossed, two_speeds)}
