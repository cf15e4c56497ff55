// Command keys makes what the parts of a cluster know each other by: two
// certificate authorities, a certificate for each part, the key that signs
// service account tokens, and a kubeconfig for each client.
package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"flag"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

const lifetime = 5 * 365 * 24 * time.Hour

type pair struct {
	certificate *x509.Certificate
	key         crypto.Signer
	certPEM     []byte
	keyPEM      []byte
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "keys: error:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := flag.NewFlagSet("keys", flag.ContinueOnError)
	out := flags.String("out", "", "`folder` to write into")
	node := flags.String("node", "", "name of the node")
	nodeIP := flags.String("node-ip", "", "address of the node and of the API server")
	serviceIP := flags.String("service-ip", "", "address of the service kubernetes.default")
	server := flags.String("server", "", "URL of the API server")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for _, name := range []string{"out", "node", "node-ip", "service-ip", "server"} {
		if flags.Lookup(name).Value.String() == "" {
			return fmt.Errorf("--%s is missing", name)
		}
	}
	addresses := map[string]net.IP{"--node-ip": net.ParseIP(*nodeIP), "--service-ip": net.ParseIP(*serviceIP)}
	for name, address := range addresses {
		if address == nil {
			return fmt.Errorf("%s is not an IP address", name)
		}
	}

	w := writer{folder: *out}
	authority := w.authority("ca", "aliquot-e2e-ca")
	frontProxy := w.authority("front-proxy-ca", "aliquot-e2e-front-proxy-ca")
	w.issue("front-proxy-client", frontProxy, request{name: "front-proxy-client"})
	w.issue("apiserver", authority, request{
		name: "kube-apiserver", server: true,
		addresses: []net.IP{addresses["--node-ip"], addresses["--service-ip"], net.IPv4(127, 0, 0, 1)},
		hosts: []string{
			"localhost", *node, "kubernetes", "kubernetes.default", "kubernetes.default.svc",
			"kubernetes.default.svc.cluster.local",
		},
	})
	w.issue("apiserver-kubelet-client", authority, request{name: "kube-apiserver-kubelet-client", group: "system:masters"})
	w.issue("kubelet-serving", authority, request{
		name: "system:node:" + *node, group: "system:nodes", server: true,
		addresses: []net.IP{addresses["--node-ip"], net.IPv4(127, 0, 0, 1)}, hosts: []string{*node, "localhost"},
	})
	w.signingKey("service-account")

	for file, who := range map[string]request{
		"admin":              {name: "aliquot-e2e-admin", group: "system:masters"},
		"controller-manager": {name: "system:kube-controller-manager"},
		"scheduler":          {name: "system:kube-scheduler"},
		"proxy":              {name: "system:kube-proxy"},
		"kubelet":            {name: "system:node:" + *node, group: "system:nodes"},
	} {
		w.kubeconfig(file, *server, authority, who)
	}
	return w.err
}

type request struct {
	name, group string
	server      bool
	addresses   []net.IP
	hosts       []string
}

// writer writes into one folder and keeps the first error.
type writer struct {
	folder string
	err    error
}

func (w *writer) write(name string, content []byte) {
	if w.err == nil {
		w.err = os.WriteFile(filepath.Join(w.folder, name), content, 0o600)
	}
}

func (w *writer) authority(file, name string) *pair {
	made := w.sign(nil, request{name: name})
	w.save(file, made)
	return made
}

func (w *writer) issue(file string, by *pair, r request) {
	w.save(file, w.sign(by, r))
}

func (w *writer) save(file string, made *pair) {
	if made != nil {
		w.write(file+".crt", made.certPEM)
		w.write(file+".key", made.keyPEM)
	}
}

func (w *writer) signingKey(file string) {
	if _, keyPEM, err := newKey(); err != nil {
		w.err = err
	} else {
		w.write(file+".key", keyPEM)
	}
}

// sign makes a key and its certificate; without an issuer, an authority.
func (w *writer) sign(by *pair, r request) *pair {
	if w.err != nil {
		return nil
	}
	made, err := sign(by, r)
	if err != nil {
		w.err = fmt.Errorf("certificate of %s: %w", r.name, err)
	}
	return made
}

func sign(by *pair, r request) (*pair, error) {
	key, keyPEM, err := newKey()
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: r.name},
		NotBefore:    time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lifetime),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
		IPAddresses:           r.addresses,
		DNSNames:              r.hosts,
	}
	if r.group != "" {
		template.Subject.Organization = []string{r.group}
	}
	if r.server {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	issuer, issuerKey := template, crypto.Signer(key)
	if by == nil {
		template.IsCA = true
		template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
		template.ExtKeyUsage = nil
	} else {
		issuer, issuerKey = by.certificate, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, key.Public(), issuerKey)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return &pair{certificate: certificate, key: key, certPEM: certPEM, keyPEM: keyPEM}, nil
}

func newKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func (w *writer) kubeconfig(file, server string, authority *pair, who request) {
	client := w.sign(authority, who)
	if client == nil {
		return
	}
	encode := base64.StdEncoding.EncodeToString
	w.write(file+".kubeconfig", fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters:
- name: aliquot-e2e
  cluster:
    server: %s
    certificate-authority-data: %s
users:
- name: %s
  user:
    client-certificate-data: %s
    client-key-data: %s
contexts:
- name: aliquot-e2e
  context:
    cluster: aliquot-e2e
    user: %s
current-context: aliquot-e2e
`, server, encode(authority.certPEM), who.name, encode(client.certPEM), encode(client.keyPEM), who.name))
}
