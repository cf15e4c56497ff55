package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	registrationv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// webhook serves an admission webhook with a certificate that it makes itself,
// registers itself by the URL of its own address or by a service, and marks
// every ConfigMap that is created with a label.
func webhook(ctx context.Context) error {
	address, service, namespace := os.Getenv("POD_IP"), os.Getenv("SERVICE"), os.Getenv("POD_NAMESPACE")
	host := address
	if service != "" {
		host = service + "." + namespace + ".svc"
	}
	certificate, bundle, err := selfSigned(host)
	if err != nil {
		return err
	}
	listener, err := tls.Listen("tcp", net.JoinHostPort(address, os.Getenv("PORT")), &tls.Config{
		Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12,
	})
	if err != nil {
		return err
	}
	label := os.Getenv("LABEL")
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { admit(w, r, label) }), ReadHeaderTimeout: time.Minute}
	go func() {
		<-ctx.Done()
		server.Close()
	}()

	client := registrationv1.WebhookClientConfig{CABundle: bundle}
	if service != "" {
		port := int32(443)
		client.Service = &registrationv1.ServiceReference{Namespace: namespace, Name: service, Port: &port}
	} else {
		url := "https://" + listener.Addr().String() + "/"
		client.URL = &url
	}
	if err := register(ctx, "smoke-"+label, client); err != nil {
		return err
	}
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func register(ctx context.Context, name string, client registrationv1.WebhookClientConfig) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	fail, none := registrationv1.Fail, registrationv1.SideEffectClassNone
	_, err = api.AdmissionregistrationV1().MutatingWebhookConfigurations().Create(ctx, &registrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Webhooks: []registrationv1.MutatingWebhook{{
			Name: name + ".aliquot.dev", ClientConfig: client, FailurePolicy: &fail, SideEffects: &none,
			AdmissionReviewVersions: []string{"v1"},
			ObjectSelector:          &metav1.LabelSelector{MatchLabels: map[string]string{"smoke": "webhook"}},
			Rules: []registrationv1.RuleWithOperations{{
				Operations: []registrationv1.OperationType{registrationv1.Create},
				Rule:       registrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
			}},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("registering the webhook: %w", err)
	}
	return nil
}

func admit(w http.ResponseWriter, r *http.Request, label string) {
	const largest = 4 << 20
	body, err := io.ReadAll(io.LimitReader(r.Body, largest))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var review admissionv1.AdmissionReview
	if err := json.Unmarshal(body, &review); err != nil || review.Request == nil {
		http.Error(w, "not an AdmissionReview", http.StatusBadRequest)
		return
	}
	patchType := admissionv1.PatchTypeJSONPatch
	review.Response = &admissionv1.AdmissionResponse{
		UID: review.Request.UID, Allowed: true, PatchType: &patchType,
		Patch: fmt.Appendf(nil, `[{"op":"add","path":"/metadata/labels/%s","value":"seen"}]`, label),
	}
	review.Request = nil
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(review); err != nil {
		fmt.Fprintln(os.Stderr, "smoke-agent: answering:", err)
	}
}

func selfSigned(host string) (tls.Certificate, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: host},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if address := net.ParseIP(host); address != nil {
		template.IPAddresses = []net.IP{address}
	} else {
		template.DNSNames = []string{host}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	var bundle bytes.Buffer
	if err := pem.Encode(&bundle, &pem.Block{Type: "CERTIFICATE", Bytes: der}); err != nil {
		return tls.Certificate{}, nil, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, bundle.Bytes(), nil
}
