// The page at /docs: Swagger UI over this server's own document. Nothing is asked of any other site.

window.SwaggerUIBundle({
  dom_id: "#docs",
  url: "openapi.json",
  validatorUrl: null,
  deepLinking: true,
  docExpansion: "list",
  defaultModelExpandDepth: 2,
  defaultModelsExpandDepth: -1,
  displayRequestDuration: true,
});
