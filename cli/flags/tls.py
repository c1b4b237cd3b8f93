"""TLS flags: --ssl-key-file and --ssl-cert-file."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError

if TYPE_CHECKING:
    import ssl


def context(options: SimpleNamespace) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the certificate chain (PEM) and its private key; None: plain HTTP."""
    key, certificate = options.ssl_key_file, options.ssl_cert_file
    if key is None and certificate is None:
        return None
    if key is None or certificate is None:
        lacking = "--ssl-key-file" if key is None else "--ssl-cert-file"
        raise CliError(f"{lacking} is needed too: TLS takes a key and a certificate")
    import ssl

    for path in (key, certificate):
        open(path, "rb").close()  # names the file that is missing; OpenSSL does not
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        tls.load_cert_chain(certificate, key, password="")  # never ask for one on the terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None)
        words = reason.replace("_", " ").lower() if reason else "no PEM, or the key has a password"
        raise CliError(f"--ssl-cert-file {certificate} and --ssl-key-file {key} do not make a pair: {words}") from None
    return tls
