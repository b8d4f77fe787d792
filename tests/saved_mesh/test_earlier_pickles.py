"""Meshes that were saved when all files of the package stood in one folder: they still load.

The texts are what an earlier Meshverse wrote on rank 1 of 8, of `mesh["tp"]`, where `mesh` has the
axes dp=2 and tp=4: compressed by zlib, in base 85.
"""

from __future__ import annotations

import base64
import io
import pickle
import zlib

import pytest
import torch

from helpers.worlds import fake_world
from meshverse import DeviceMesh, init_device_mesh, load_mesh

# `pickle.dumps(mesh["tp"], protocol=2)`
_PICKLED = (
    "c-oE6$!@|h6a~;QmZ1X$I!|;C8<eUo<R7x@%9|*1<4281Np2>U1yVO4<*#c3AJE;s_S5t6Z_)jxNTw7<G>CXg!ddr*"
    "=kslXwm?B=6;0DZKAT1;S~XVQHk7OatEv)FIN=`3md5I;3Ud7<@JOJN<-_Y$s4lRhvu1vuPF!;0c|fSKk~(pN1oeEB"
    "|4@X6ji!xVtITceSp~krKF<v^u2$iI6;+M{w3awz9hHNSlp!T&&2s!uP>6PxW5ynjW11;UXM>6PSA=dq&r_O5II?lf"
    "da4agE)3WB<m8S_!yKCC+t@Tm@2|oTFNWYa;mPLnz8~Xsfiqp!WL+xmxo+daDk|@#Qm=4j<2vWx<oq7V4O#@am8})-"
    "WIL0cOm_QHJ%6wN@BN4WjXhG5Eb;V#=fNK*)q{x"
)

# The same of a mesh of a subclass, but for the class: `load_mesh_as(DeviceMesh, save_mesh(...))`
_AS_SUBCLASS = (
    "c-oDRxlY4C6h)m4NWvCE*q5-I1{tyW1L!Oos%b21@VqclLhS3YBPb%#5XpbdWK2Ps?%bKH_s;t+haaTmm=Z-dijPSI"
    "v)mX)yr6)q2CRQ2LF0Z%MeEt{%M4MPplq|6WmyRy4HPQg6080tRJ{^g&_Pks=R?#yi`8`$6h>J*B!Pw8lxI`1IKh(5"
    "n&#i^O21-4omKQp7-wjhD*q&frjKPGD_)iRSoKPLiZyN=MqH1=IxA~VW3+y-!P=VRgtWt$f|*tjC4v&Pb0gCm@-(H9"
    "mf0+1QvR;cxi&nYFNG~1+pMe8qsxU8I&Yl9C)aTwUH87{x=#;x!V$NQ;Mn0=aeNe|*qva{mUY>XT6f>}ap0A;@1eGy"
    ";>gFb(eE1l6Ox6rh;b@gQ=G|mE;n=8xt4nUxjo<hi}`Aolx0&~y~4iv1-KxRF8"
)

# `torch.save(mesh["tp"], ...)`
_SAVED = (
    "c-ozmy>HV%7{)Ijb<!5vG;Jv@P|9~IL3;V9?FdzsGGxF@goI=vMbS0B##Y@puk8eiR0#>SQbvTt$jZ(F3ljeVD`J9)"
    "iJgf%J58O0w52CmcW1xv^ZxGc@s*WG6rp$=4YdSHB4XEcqfOT|;*xZ8$1D}6(9^#5GF;oGj^3uWL(>jvQ?1J96Q)JF"
    "BS8BQN~vQ^(k6`^2f|8Rjdo`cQ9`P~CJwa?VnS3w>NuNfv}U!MCe>i9;{|gm5cVOKQYXFdZKFo3?p~8ZT#c|dwPp*("
    "y-@O;Ixtaz$qHOhqND;Bl@K|EDdI6S2$O<oHO$6t6A}k7qt3E%)257}O{*NMYS|jKA=&X@woT%?w83CzeHfS29hh77"
    "#yfP+f%yttQdihal!=CGc#F`QBx6~W<@~lROY1oeYZ<H&SRgHb@s{Pn<$YL8>2ZBrXShqL3S3dbjQ1*|K7?x(SoZL*"
    "d-y9<_o1~W+|Uz;a8plq^x2L+x2m)9w^C=TfBS4<cWA410Cyk5y>wZL#ot%{eEShXh(G0#j#)s9J;$WCEqj-^Rc;K!"
    "YLtre1IFpL4441-`}-@VjQBHJehEp(@{ViSq)w~EH0q6A+Hgz7+`lWF+{8Qw*n9@R_}+$31eigaJ%Ft}mwF~C6(63b"
    "?ol%h*EK0;IN12P$o~Z4M22a!(PQZCZQ=X`xd~qT>%01s)7QU@vd0I&uY@)KuQgr}mvK}LtyE0^CkoCMu$&iVQIaGv"
    "Tgc`zIFE4#7etJ6>sTyE>|0*OobvOd4_{J@Bjr(sIBbtI=+MLv`QSY^m>o3WLSJS!j7E8SP$X!gr9P3@L6ITn4(bGr"
    "Fw>`#jG$oy4yFgsa=I`5Z6JNb8iHHA++RD2PC5LtA_(`7tP*+9%M=FsHzB|O6!m+S7vsIs4e)P)F~QFfym&wMFN%bP"
    "RR"
)


def _bytes(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))


def test_a_pickled_mesh_is_the_live_one() -> None:
    with fake_world(8, rank=1):
        mesh = _mesh()
        assert pickle.loads(_bytes(_PICKLED)) is mesh["tp"]


def test_a_pickled_mesh_of_a_subclass_is_on_the_live_groups() -> None:
    with fake_world(8, rank=1):
        mesh = _mesh()
        loaded = pickle.loads(_bytes(_AS_SUBCLASS))
        assert loaded == mesh["tp"]
        assert loaded.get_group() is mesh.get_group("tp")


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_mesh_that_torch_saved_is_the_live_one(weights_only: bool) -> None:
    with fake_world(8, rank=1):
        mesh = _mesh()
        assert torch.load(io.BytesIO(_bytes(_SAVED)), weights_only=weights_only) is mesh["tp"]


def test_the_class_is_where_it_was() -> None:
    assert pickle.loads(b"\x80\x02cmeshverse.device_mesh\nDeviceMesh\nq\x00.") is DeviceMesh


def test_what_is_saved_now_names_the_same() -> None:
    with fake_world(8, rank=1):
        assert b"cmeshverse.saved_mesh\nload_mesh\n" in pickle.dumps(_mesh(), protocol=2)
    assert pickle.dumps(DeviceMesh, protocol=2) == (
        b"\x80\x02cmeshverse.device_mesh\nDeviceMesh\nq\x00."
    )
    assert load_mesh.__module__ == "meshverse.saved_mesh"
