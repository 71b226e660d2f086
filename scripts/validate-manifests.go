// Prints what an API server would refuse of the objects in the files that the arguments name, by
// Kubernetes' own code. The exit code is 1 if there is anything. scripts/validate-manifests builds
// it.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/apps"
	appsinstall "k8s.io/kubernetes/pkg/apis/apps/install"
	appsval "k8s.io/kubernetes/pkg/apis/apps/validation"
	"k8s.io/kubernetes/pkg/apis/batch"
	batchinstall "k8s.io/kubernetes/pkg/apis/batch/install"
	batchval "k8s.io/kubernetes/pkg/apis/batch/validation"
	"k8s.io/kubernetes/pkg/apis/core"
	coreinstall "k8s.io/kubernetes/pkg/apis/core/install"
	coreval "k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/apis/networking"
	netinstall "k8s.io/kubernetes/pkg/apis/networking/install"
	netval "k8s.io/kubernetes/pkg/apis/networking/validation"
	"k8s.io/kubernetes/pkg/apis/rbac"
	rbacinstall "k8s.io/kubernetes/pkg/apis/rbac/install"
	rbacval "k8s.io/kubernetes/pkg/apis/rbac/validation"
	"k8s.io/kubernetes/pkg/apis/storage"
	storageinstall "k8s.io/kubernetes/pkg/apis/storage/install"
	storageval "k8s.io/kubernetes/pkg/apis/storage/validation"
	"k8s.io/kubernetes/pkg/capabilities"
)

const fluid = "apiVersion: data.fluid.io/"

func main() {
	capabilities.Setup(true, 0) // privileged containers are allowed
	appsinstall.Install(legacyscheme.Scheme)
	batchinstall.Install(legacyscheme.Scheme)
	coreinstall.Install(legacyscheme.Scheme)
	netinstall.Install(legacyscheme.Scheme)
	rbacinstall.Install(legacyscheme.Scheme)
	storageinstall.Install(legacyscheme.Scheme)
	// Strict: an unknown field is an error.
	codecs := serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict)
	decoder := codecs.UniversalDecoder()
	refused := 0
	for _, file := range os.Args[1:] {
		content, err := os.ReadFile(file)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
		for number := 1; ; number++ {
			document, err := documents.Read()
			if errors.Is(err, io.EOF) {
				break
			}
			for _, what := range check(decoder, document, err) {
				refused++
				fmt.Printf("%s: object %d: %v\n", file, number, what)
			}
		}
	}
	if refused > 0 {
		os.Exit(1)
	}
}

// check returns what is wrong with one object. Those of Fluid are left out.
func check(decoder runtime.Decoder, document []byte, err error) []error {
	if err != nil {
		return []error{err}
	}
	if strings.Contains(string(document), fluid) {
		return nil
	}
	object, _, err := decoder.Decode(document, nil, nil)
	if err != nil {
		return []error{err}
	}
	var all []error
	for _, one := range validate(object) {
		all = append(all, one)
	}
	return all
}

// validate fills in what an API server fills in before it validates, as far as our manifests need
// that, and validates.
func validate(object runtime.Object) field.ErrorList {
	if about, ok := object.(v1.Object); ok && about.GetNamespace() == "" {
		switch object.(type) {
		case *core.Pod, *core.PersistentVolumeClaim, *core.Secret, *batch.CronJob:
			about.SetNamespace("default")
		}
	}
	switch x := object.(type) {
	case *apps.DaemonSet:
		return appsval.ValidateDaemonSet(x, coreval.PodValidationOptions{})
	case *apps.Deployment:
		return appsval.ValidateDeployment(x, coreval.PodValidationOptions{})
	case *core.Pod:
		return coreval.ValidatePodCreate(x, coreval.PodValidationOptions{})
	case *core.Service:
		x.Spec.ClusterIPs = []string{x.Spec.ClusterIP}
		return coreval.ValidateServiceCreate(x)
	case *core.ConfigMap:
		return coreval.ValidateConfigMap(x)
	case *core.Secret:
		return coreval.ValidateSecret(x)
	case *core.PersistentVolume:
		return coreval.ValidatePersistentVolume(x, coreval.PersistentVolumeSpecValidationOptions{})
	case *core.PersistentVolumeClaim:
		return coreval.ValidatePersistentVolumeClaim(x, coreval.PersistentVolumeClaimSpecValidationOptions{})
	case *core.ServiceAccount:
		return coreval.ValidateServiceAccount(x)
	case *core.Namespace:
		return coreval.ValidateNamespace(x)
	case *batch.Job: // as a template, which has no selector: the API server makes one
		cron := &batch.CronJob{ObjectMeta: x.ObjectMeta, Spec: batch.CronJobSpec{
			Schedule: "@daily", ConcurrencyPolicy: batch.AllowConcurrent,
			JobTemplate: batch.JobTemplateSpec{Spec: x.Spec},
		}}
		cron.Namespace = "default"
		return batchval.ValidateCronJobCreate(cron, coreval.PodValidationOptions{})
	case *batch.CronJob:
		return batchval.ValidateCronJobCreate(x, coreval.PodValidationOptions{})
	case *networking.NetworkPolicy:
		return netval.ValidateNetworkPolicy(x, netval.NetworkPolicyValidationOptions{})
	case *rbac.ClusterRole:
		return rbacval.ValidateClusterRole(x, rbacval.ClusterRoleValidationOptions{})
	case *rbac.ClusterRoleBinding:
		return rbacval.ValidateClusterRoleBinding(x)
	case *storage.CSIDriver:
		return storageval.ValidateCSIDriver(x)
	case *storage.StorageClass:
		return storageval.ValidateStorageClass(x)
	}
	return field.ErrorList{field.InternalError(nil, fmt.Errorf("no check for %T; add one here", object))}
}
