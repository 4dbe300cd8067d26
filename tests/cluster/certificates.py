"""A certificate authority and a server's certificate."""

from daemons import run


def make_certificates(folder, names):
    """Writes ca.crt, tls.crt and tls.key for a server with these names."""
    folder.mkdir()
    extension = folder / "names"
    extension.write_text("subjectAltName=" + ",".join(f"DNS:{name}" for name in names))

    def openssl(*arguments):
        run("openssl", *arguments, cwd=folder)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "tls.key", "-out", "tls.csr", "-subj", "/CN=rapt")
    signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", extension]
    openssl("x509", "-req", "-in", "tls.csr", *signing, "-out", "tls.crt")
