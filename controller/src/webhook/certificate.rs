//! The webhook's own certificate: an authority that signs one leaf and is thrown away.
//!
//! Authority and leaf are renewed together, after two thirds of their time. The bundle that the API
//! server gets holds the previous authority too, so that replicas that still serve the old leaf are
//! trusted until they see the new one. Nothing that could sign another certificate is stored.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::{SignedDuration, Timestamp, tz::TimeZone};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How long a certificate lasts.
const LIFE: SignedDuration = SignedDuration::from_hours(365 * 24);
/// When it is renewed.
const RENEW_AFTER: SignedDuration = SignedDuration::from_hours(243 * 24);

const MADE: &str = "aliquot.dev/made";
const NAMES: &str = "aliquot.dev/names";
const CA: &str = "ca.crt";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

/// What is served, and what the API server must trust.
#[derive(Debug, Clone)]
pub struct Certificate {
    /// Leaf and key.
    pub key: Arc<CertifiedKey>,
    /// Authorities, PEM.
    pub bundle: String,
    made: Timestamp,
    names: String,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// The Secret is not one of ours, or damaged.
    #[error("Secret {name} has no usable {what}; delete it and a new one is made")]
    Unusable {
        /// Name of the Secret.
        name: String,
        /// What is wrong.
        what: String,
    },
    /// Making one failed.
    #[error("making a certificate: {0}")]
    Making(#[from] rcgen::Error),
}

impl Certificate {
    /// Reads what the replicas share.
    pub fn read(secret: &Secret) -> Result<Self, CertificateError> {
        let name = secret.metadata.name.clone().unwrap_or_default();
        let fail = |what: &str| CertificateError::Unusable { name: name.clone(), what: what.to_owned() };
        let field = |key: &str| {
            secret
                .data
                .as_ref()
                .and_then(|data| data.get(key))
                .map(|value| value.0.as_slice())
                .ok_or_else(|| fail(key))
        };
        let note = |key: &str| secret.metadata.annotations.as_ref().and_then(|all| all.get(key)).cloned();
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(field(CERTIFICATE)?)
            .collect::<Result<_, _>>()
            .map_err(|_| fail(CERTIFICATE))?;
        let key = PrivateKeyDer::from_pem_slice(field(KEY)?).map_err(|_| fail(KEY))?;
        let key = rustls::crypto::ring::sign::any_supported_type(&key).map_err(|_| fail(KEY))?;
        if chain.is_empty() {
            return Err(fail(CERTIFICATE));
        }
        let bundle = std::str::from_utf8(field(CA)?).map_err(|_| fail(CA))?.to_owned();
        let made = note(MADE).and_then(|made| made.parse().ok()).ok_or_else(|| fail(MADE))?;
        Ok(Self {
            key: Arc::new(CertifiedKey::new(chain, key)),
            bundle,
            made,
            names: note(NAMES).unwrap_or_default(),
        })
    }

    /// Whether it has to be made anew: it is old, or for other names.
    pub fn is_stale(&self, names: &[String], now: Timestamp) -> bool {
        now.duration_since(self.made) > RENEW_AFTER || self.names != names.join(",")
    }
}

/// A new certificate for these names, as the Secret in which the replicas share it. The first
/// authority of the previous bundle stays trusted.
pub(super) fn make(
    name: &str,
    namespace: &str,
    names: &[String],
    previous: Option<&Certificate>,
    now: Timestamp,
) -> Result<Secret, CertificateError> {
    let (from, until) = (now.saturating_sub(SignedDuration::from_hours(24)), now.saturating_add(LIFE));
    let (Ok(from), Ok(until)) = (from, until) else {
        let what = "time: the clock is far off".to_owned();
        return Err(CertificateError::Unusable { name: name.to_owned(), what });
    };
    // Midnight of a day: rcgen's own type for points in time, which only its functions name.
    let date = |at: Timestamp| {
        let day = at.to_zoned(TimeZone::UTC).date();
        let (month, of_month) =
            (u8::try_from(day.month()).unwrap_or(1), u8::try_from(day.day()).unwrap_or(1));
        rcgen::date_time_ymd(day.year().into(), month, of_month)
    };
    let serial = || SerialNumber::from_slice(uuid::Uuid::new_v4().as_bytes());
    let mut authority = CertificateParams::default();
    authority.distinguished_name.push(DnType::CommonName, "aliquot webhook authority");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    (authority.not_before, authority.not_after) = (date(from), date(until));
    authority.serial_number = Some(serial());
    let authority_key = KeyPair::generate()?;
    let authority_certificate = authority.self_signed(&authority_key)?;
    let issuer = Issuer::new(authority, authority_key);

    let mut leaf = CertificateParams::new(names.to_vec())?;
    let common = names.first().map_or("aliquot-webhook", String::as_str);
    // Common names are at most 64 bytes; the alternative names are what counts.
    leaf.distinguished_name
        .push(DnType::CommonName, common.get(..common.len().min(64)).unwrap_or("aliquot-webhook"));
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    leaf.use_authority_key_identifier_extension = true;
    (leaf.not_before, leaf.not_after) = (date(from), date(until));
    leaf.serial_number = Some(serial());
    let leaf_key = KeyPair::generate()?;
    let leaf = leaf.signed_by(&leaf_key, &issuer)?;

    let mut bundle = authority_certificate.pem();
    if let Some(previous) = previous.and_then(|previous| first_certificate(&previous.bundle)) {
        bundle.push_str(previous);
    }
    let bytes = |text: String| ByteString(text.into_bytes());
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(namespace.to_owned()),
            annotations: Some(BTreeMap::from([
                (MADE.to_owned(), now.to_string()),
                (NAMES.to_owned(), names.join(",")),
            ])),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        data: Some(BTreeMap::from([
            (CA.to_owned(), bytes(bundle)),
            (CERTIFICATE.to_owned(), bytes(leaf.pem())),
            (KEY.to_owned(), bytes(leaf_key.serialize_pem())),
        ])),
        ..Secret::default()
    })
}

fn first_certificate(bundle: &str) -> Option<&str> {
    const END: &str = "-----END CERTIFICATE-----";
    let end = bundle.find(END)? + END.len();
    // The line's end belongs to it.
    let end = bundle.get(end..)?.find('\n').map_or(end, |newline| end + newline + 1);
    bundle.get(..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};
    use rustls::{CertificateError as TlsError, RootCertStore};

    fn now() -> Timestamp {
        Timestamp::now()
    }

    fn names() -> Vec<String> {
        vec!["hook.aliquot-system.svc".to_owned(), "127.0.0.1".to_owned()]
    }

    fn made(previous: Option<&Certificate>) -> Certificate {
        Certificate::read(&make("s", "ns", &names(), previous, now()).expect("made")).expect("read")
    }

    fn trusts(bundle: &str, certificate: &Certificate, name: &str) -> Result<(), rustls::Error> {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
            roots.add(root.expect("PEM")).expect("an authority");
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .expect("a verifier");
        let name = ServerName::try_from(name.to_owned()).expect("a name");
        let leaf = certificate.key.cert.first().expect("a leaf");
        verifier.verify_server_cert(leaf, &[], &name, &[], UnixTime::now()).map(drop)
    }

    #[test]
    fn a_client_that_trusts_the_bundle_accepts_the_leaf_for_its_names_only() {
        let certificate = made(None);
        for name in names() {
            assert_eq!(trusts(&certificate.bundle, &certificate, &name), Ok(()), "{name}");
        }
        assert!(trusts(&certificate.bundle, &certificate, "other.example.com").is_err());
        let stranger = made(None);
        // Another authority may have the same name, if it was made in the same second; never the same key.
        let refused = trusts(&stranger.bundle, &certificate, "127.0.0.1");
        assert!(
            matches!(
                refused,
                Err(rustls::Error::InvalidCertificate(TlsError::UnknownIssuer | TlsError::BadSignature))
            ),
            "{refused:?}"
        );
    }

    #[test]
    fn after_a_renewal_the_previous_leaf_is_still_trusted_and_the_one_before_it_is_not() {
        let first = made(None);
        let second = made(Some(&first));
        let third = made(Some(&second));
        for old in [&first, &second] {
            assert_eq!(trusts(&second.bundle, old, "127.0.0.1"), Ok(()));
        }
        assert_eq!(trusts(&third.bundle, &second, "127.0.0.1"), Ok(()));
        assert!(trusts(&third.bundle, &first, "127.0.0.1").is_err());
    }

    #[test]
    fn it_is_renewed_when_it_is_old_or_for_other_names() {
        let certificate = made(None);
        assert!(!certificate.is_stale(&names(), now()));
        assert!(certificate.is_stale(&["other".to_owned()], now()));
        let later = now().saturating_add(SignedDuration::from_hours(24 * 244)).expect("in range");
        assert!(certificate.is_stale(&names(), later));
    }

    #[test]
    fn a_damaged_secret_is_told_by_name() {
        let mut secret = make("s", "ns", &names(), None, now()).expect("made");
        secret.data.as_mut().expect("data").insert(KEY.to_owned(), ByteString(b"nonsense".to_vec()));
        let error = Certificate::read(&secret).expect_err("damaged");
        assert_eq!(error.to_string(), "Secret s has no usable tls.key; delete it and a new one is made");
    }
}
