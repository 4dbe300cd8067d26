"""The chart in a namespace under the restricted Pod Security Standard, with plain text and with TLS."""

from conftest import FOLDER
from certificates import make_certificates
from traffic import Traffic


def test_plain_text(node, release):
    release.install()
    release.helm("test", "rapt")
    with Traffic(node, release) as traffic:
        traffic.finish("installed, plain text")


def test_tls(node, release):
    folder = FOLDER / "server-certificates"
    make_certificates(folder, ["rapt", f"rapt.{release.namespace}"])
    files = [f"--from-file={folder / name}" for name in ("ca.crt", "tls.crt", "tls.key")]
    release.kubectl("create", "secret", "generic", "rapt-tls", "--type=kubernetes.io/tls", *files)
    release.tls_secret = "rapt-tls"
    release.install()
    release.helm("test", "rapt")
    with Traffic(node, release) as traffic:
        traffic.finish("installed, TLS")
