//! Callers that have to show a certificate.

use super::super::callers::CallersFile;
use super::*;
use std::io::ErrorKind;

/// A caller's certificate, and what signed it.
pub(super) struct Caller {
    authority: String,
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: Vec<u8>,
}

impl Caller {
    fn new() -> Self {
        let mut authority = rcgen::CertificateParams::default();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority_key = rcgen::KeyPair::generate().expect("a key");
        let certificate = authority.self_signed(&authority_key).expect("signed");
        let issuer = rcgen::Issuer::new(authority, authority_key);
        let mut leaf = rcgen::CertificateParams::new(vec!["kube-apiserver".to_owned()]).expect("a name");
        leaf.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        let key = rcgen::KeyPair::generate().expect("a key");
        let leaf = leaf.signed_by(&key, &issuer).expect("signed");
        Self { authority: certificate.pem(), chain: vec![leaf.der().clone()], key: key.serialize_der() }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn who_shows_no_certificate_of_the_callers_authority_gets_no_review() {
    let (app, _watches) = app(HOUR, FailurePolicy::Ignore);
    let (known, stranger) = (Caller::new(), Caller::new());
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), "").expect("written");
    let error = CallersFile::open(file.path().to_owned()).expect_err("nobody").to_string();
    assert!(error.contains("--client-ca-file") && error.contains("no certificate"), "{error}");
    std::fs::write(file.path(), &known.authority).expect("written");
    let authorities = CallersFile::open(file.path().to_owned()).expect("an authority");
    let Served { addr, bundle, stop, serving } =
        serve_to(authorities.callers(), &app, ReviewMemory::default()).await;
    let review = review("good", "ResourceClaim", &wrong());
    let answer = post_as(Some(&known), addr, &bundle, "/validate", &review).await.expect("an answer");
    assert_eq!(answer["response"]["status"]["code"], 422, "{answer}");
    for caller in [None, Some(&stranger)] {
        let answer = post_as(caller, addr, &bundle, "/validate", &review).await;
        assert!(answer.is_err(), "{answer:?}");
    }
    assert_eq!(app.metrics.refused.get(), 1);
    stop.cancel();
    serving.await.expect("no panic");
}

/// Whether a caller's review is answered, over a connection of its own.
async fn is_answered(caller: &Caller, served: &Served) -> bool {
    let review = review("good", "ResourceClaim", &wrong());
    match post_as(Some(caller), served.addr, &served.bundle, "/validate", &review).await {
        Ok(answer) => {
            assert_eq!(answer["response"]["status"]["code"], 422, "{answer}");
            true
        }
        Err(_) => false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn other_authorities_in_the_callers_file_count_at_once_and_what_cannot_be_read_changes_nothing() {
    let (app, _watches) = app(HOUR, FailurePolicy::Ignore);
    let (former, next) = (Caller::new(), Caller::new());
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("ca.crt");
    std::fs::write(&path, &former.authority).expect("written");
    let mut file = CallersFile::open(path.clone()).expect("an authority");
    let served = serve_to(file.callers(), &app, ReviewMemory::default()).await;
    assert!(!file.look().await.expect("readable"), "it says the same");
    assert!(is_answered(&former, &served).await);
    assert!(!is_answered(&next, &served).await);

    std::fs::write(&path, format!("{}{}", former.authority, next.authority)).expect("written");
    assert!(file.look().await.expect("readable"));
    assert!(is_answered(&former, &served).await);
    assert!(is_answered(&next, &served).await);

    // Who is connected when its authority goes is let go as well.
    let mut idle = connect(Some(&former), served.addr, &served.bundle).await.expect("connected");
    std::fs::write(&path, &next.authority).expect("written");
    assert!(file.look().await.expect("readable"));
    let ended = idle.read(&mut [0; 1]).await;
    assert!(
        ended.as_ref().map_or_else(|error| error.kind() == ErrorKind::UnexpectedEof, |read| *read == 0),
        "{ended:?}"
    );
    assert!(!is_answered(&former, &served).await);
    assert!(is_answered(&next, &served).await);

    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for text in [Some(""), Some(broken), None] {
        match text {
            Some(text) => std::fs::write(&path, text).expect("written"),
            None => std::fs::remove_file(&path).expect("removed"),
        }
        let error = file.look().await.expect_err("nobody's authority").to_string();
        assert!(error.contains("--client-ca-file") && error.contains("ca.crt"), "{error}");
        assert!(is_answered(&next, &served).await, "{error}");
        assert!(!is_answered(&former, &served).await, "{error}");
    }
    std::fs::write(&path, &former.authority).expect("written");
    assert!(file.look().await.expect("readable"), "it is read again");
    assert!(is_answered(&former, &served).await);
    served.stop.cancel();
    served.serving.await.expect("no panic");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_callers_file_is_read_again_and_again_until_the_end() {
    let (former, next) = (Caller::new(), Caller::new());
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), &former.authority).expect("written");
    let read = CallersFile::open(file.path().to_owned()).expect("an authority");
    let (mut callers, stop) = (read.callers(), CancellationToken::new());
    let running = tokio::spawn(read.run(Duration::from_millis(1), stop.clone()));
    for authority in [&next.authority, &former.authority] {
        callers.mark_unchanged();
        std::fs::write(file.path(), authority).expect("written");
        callers.changed().await.expect("it goes on");
    }
    stop.cancel();
    running.await.expect("no panic");
}
