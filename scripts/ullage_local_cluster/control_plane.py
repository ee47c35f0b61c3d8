"""Starts the control plane: certificates, etcd, API server, controller manager and scheduler."""

import json
import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx

from ullage_local_cluster.processes import run, start, wait_until
from ullage_local_cluster.settings import ClusterSettings

DAYS = "365"
USERS = {
    "admin": "/O=system:masters/CN=admin",
    "controllers": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
}
"""The certificate subject of each Kubernetes user."""
API_SERVER_MAY = ("system:kubelet-api-admin", "--user=kube-apiserver")
NODES_MAY = ("system:node", "--group=system:nodes")


def make_credentials(settings: ClusterSettings) -> None:
    """Create the cluster's certificate authority, its certificates and its kubeconfigs."""
    pki = settings.home / "pki"
    pki.mkdir(mode=0o700)

    ca = ("-keyout", pki / "ca.key", "-out", pki / "ca.crt", "-subj", f"/CN={settings.name}-ca")
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", DAYS, *ca)
    run("openssl", "genrsa", "-out", pki / "accounts.key", "2048")
    run("openssl", "rsa", "-in", pki / "accounts.key", "-pubout", "-out", pki / "accounts.pub")

    dns = [f"kubernetes{suffix}" for suffix in ("", ".default", ".default.svc")]
    addresses = ["127.0.0.1", settings.address, settings.first_service]
    names = [*(f"DNS:{name}" for name in dns), *(f"IP:{address}" for address in addresses)]
    sign(pki, "apiserver", "/CN=kube-apiserver", ",".join(names))

    users = {**USERS, "kubelet": f"/O=system:nodes/CN=system:node:{settings.node}"}
    for user, subject in users.items():
        sign(pki, user, subject, "DNS:localhost")
        write_kubeconfig(settings, user)


def sign(pki: Path, name: str, subject: str, names: str) -> None:
    """Create a certificate for server and client use, signed by the cluster's authority."""
    key = pki / f"{name}.key"
    request = pki / f"{name}.csr"
    options = ("-keyout", key, "-out", request, "-subj", subject)
    run("openssl", "req", "-newkey", "rsa:2048", "-nodes", *options)

    extensions = pki / f"{name}.cnf"
    extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=clientAuth,serverAuth\n")
    authority = ("-CA", pki / "ca.crt", "-CAkey", pki / "ca.key", "-CAcreateserial")
    signed = ("-out", pki / f"{name}.crt", "-days", DAYS, "-extfile", extensions)
    run("openssl", "x509", "-req", "-in", request, *authority, *signed)


def write_kubeconfig(settings: ClusterSettings, user: str) -> None:
    pki = settings.home / "pki"
    cluster = {"server": settings.api_url, "certificate-authority": str(pki / "ca.crt")}
    files = {"client-certificate": str(pki / f"{user}.crt"), "client-key": str(pki / f"{user}.key")}
    # JSON is YAML.
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": settings.name, "cluster": cluster}],
        "users": [{"name": user, "user": files}],
        "contexts": [{"name": "it", "context": {"cluster": settings.name, "user": user}}],
        "current-context": "it",
    }
    (settings.home / f"{user}.conf").write_text(json.dumps(config, indent=1))


def kubectl(settings: ClusterSettings, *words: str | Path, check: bool = True) -> str:
    return run("kubectl", f"--kubeconfig={settings.kubeconfig}", *words, check=check)


def api_client(settings: ClusterSettings) -> httpx.Client:
    """Return an API server client with all permissions."""
    pki = settings.home / "pki"
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    return httpx.Client(base_url=settings.api_url, verify=context, trust_env=False, timeout=10)


def start_control_plane(settings: ClusterSettings, programs: Mapping[str, Path]) -> None:
    """Start the control plane's programs, and wait until the API server is ready."""
    home = settings.home
    clients = f"http://127.0.0.1:{settings.port('etcd')}"
    peers = f"http://127.0.0.1:{settings.port('etcd-peers')}"
    etcd = [
        "etcd",
        f"--data-dir={home}/etcd",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--unsafe-no-fsync",
    ]
    start("etcd", etcd, home)

    pki = home / "pki"
    server: list[str | Path] = [
        programs["kube-apiserver"],
        f"--etcd-servers={clients}",
        f"--bind-address={settings.address}",
        f"--advertise-address={settings.address}",
        f"--secure-port={settings.port('api')}",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/apiserver.crt",
        f"--kubelet-client-key={pki}/apiserver.key",
        # No name of the node has to be in this machine's /etc/hosts.
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={pki}/accounts.pub",
        f"--service-account-signing-key-file={pki}/accounts.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={settings.service_range}",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
    ]
    start("apiserver", server, home)
    wait_until(
        lambda: "ok" in kubectl(settings, "get", "--raw", "/readyz", check=False),
        "apiserver",
        home,
    )

    controllers = [
        f"--service-account-private-key-file={pki}/accounts.key",
        f"--root-ca-file={pki}/ca.crt",
        "--use-service-account-credentials",
    ]
    start_client(settings, programs["kube-controller-manager"], "controllers", *controllers)
    start_client(settings, programs["kube-scheduler"], "scheduler")

    for role, subject in (API_SERVER_MAY, NODES_MAY):
        binding = f"local-{role.replace(':', '-')}"
        kubectl(settings, "create", "clusterrolebinding", binding, f"--clusterrole={role}", subject)


def start_client(settings: ClusterSettings, program: Path, user: str, *more: str) -> None:
    """Start a control plane program that is a client of the API server."""
    config = settings.home / f"{user}.conf"
    command: list[str | Path] = [
        program,
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={settings.port(user)}",
        *more,
    ]
    start(user, command, settings.home)
